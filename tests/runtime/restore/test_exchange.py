"""The exchange between processes: each chunk read once, right bytes whoever fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.runtime.clock import SystemClock
from everstep.runtime.errors import CheckpointInvalid, PeerUnavailable
from everstep.runtime.layout.boxes import Box, whole
from everstep.runtime.restore import exchange as exchange_module
from everstep.runtime.restore.handover import Header, Kind, Wire
from everstep.runtime.restore.reshard import SourceKind
from exchanging import KEY, Board, CountedArrays, Everybody, Rig

SHAPE = (64, 48)


@pytest.fixture(autouse=True)
def _however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "EXCHANGE_BYTES_MIN", 1)


def rows(count: int, shape: tuple[int, ...] = SHAPE) -> dict[int, tuple[Box, ...]]:
    side = shape[0] // count
    return {p: (Box((p * side, 0), ((p + 1) * side, shape[1])),) for p in range(count)}


def columns(count: int, shape: tuple[int, ...] = SHAPE) -> dict[int, tuple[Box, ...]]:
    side = shape[1] // count
    return {p: (Box((0, p * side), (shape[0], (p + 1) * side)),) for p in range(count)}


def replicated(count: int, shape: tuple[int, ...] = SHAPE) -> dict[int, tuple[Box, ...]]:
    return dict.fromkeys(range(count), (whole(shape),))


def stored(*chunks: tuple[int, ...], shape: tuple[int, ...] = SHAPE) -> CountedArrays:
    arrays = [
        np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + at for at in range(len(chunks))
    ]
    return CountedArrays(arrays, chunks)


@pytest.mark.parametrize("layout", [rows, columns, replicated], ids=["rows", "columns", "whole"])
def test_each_chunk_is_read_once_and_everybody_has_what_it_needs(
    layout: Callable[[int], dict[int, tuple[Box, ...]]],
) -> None:
    rig = Rig(stored((16, 48), (16, 16)), [layout(4), columns(4)], 4)
    results = rig.restore_all()
    rig.check(results)
    assert set(rig.stored.reads.values()) == {1}
    kinds = (SourceKind.STORAGE, SourceKind.PASSED)
    read, passed = (sum(r.tally.bytes_by_kind[k] for r in results.values()) for k in kinds)
    needed = sum(b.size for needs in rig.everybody for boxes in needs.values() for b in boxes)
    assert read == sum(array.nbytes for array in rig.stored.arrays)
    assert 4 * needed - read <= passed <= 4 * needed
    assert all(not r.tally.rejected for r in results.values())


@st.composite
def layouts(draw: st.DrawFn) -> tuple[CountedArrays, Everybody, int]:
    processes = draw(st.integers(2, 4))
    shapes = [draw(st.lists(st.integers(1, 9), max_size=3)) for _ in range(draw(st.integers(1, 2)))]
    chunks = [tuple(draw(st.integers(1, n)) for n in shape) for shape in shapes]
    everybody: list[dict[int, tuple[Box, ...]]] = []
    for shape in shapes:
        boxes = [Box((), ())]
        for length in shape:
            inner = draw(st.sets(st.integers(1, length), max_size=2))
            pairs = list(itertools.pairwise(sorted({0, length, *inner})))
            boxes = [Box((*b.start, a), (*b.stop, z)) for b in boxes for a, z in pairs]
        needs = {
            p: tuple(draw(st.lists(st.sampled_from(boxes), unique=True))) for p in range(processes)
        }
        everybody.append({p: found for p, found in needs.items() if found})
    arrays = [np.arange(np.prod(s, dtype=int), dtype=np.int16).reshape(s) for s in shapes]
    return CountedArrays(arrays, chunks), everybody, processes


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from([1, 100, 1 << 20]), st.booleans())
def test_any_layout_arrives_with_each_chunk_read_once(
    layout: tuple[CountedArrays, Everybody, int], memory_bytes: int, is_staged: bool
) -> None:
    arrays, everybody, processes = layout
    arrays.reads.clear()
    stages = [[leaf] for leaf in range(len(everybody))] if is_staged else ()
    rig = Rig(arrays, everybody, processes, memory_bytes=memory_bytes, stages=stages)
    rig.check(rig.restore_all())
    assert max(arrays.reads.values(), default=1) == 1


def test_what_is_cast_is_cast_where_it_arrives() -> None:
    rig = Rig(stored((16, 48)), [columns(4)], 4, dtype="float16")
    rig.check(rig.restore_all())
    assert set(rig.stored.reads.values()) == {1}


def test_little_is_read_by_everybody_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "EXCHANGE_BYTES_MIN", 1 << 20)
    rig = Rig(stored((16, 48)), [columns(2)], 2)
    rig.check(rig.restore_all())
    assert set(rig.stored.reads.values()) == {2}


def test_a_process_that_never_comes_is_named_and_its_share_is_read_by_the_others() -> None:
    rig = Rig(stored((16, 48), (8, 8)), [columns(4), replicated(4)], 4, deadline_s=0.5)
    results = rig.restore_all([0, 1, 3])
    rig.check(results)
    for result in results.values():
        assert any("process 2" in words for words in result.tally.rejected)


class WithoutPatience(Board):
    """A meeting that gives up on a process before anything else does."""

    def get(self, key: str, timeout_s: float) -> str:
        return super().get(key, timeout_s / 10)


def test_a_process_that_does_not_say_where_it_is_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exchanging.Board", WithoutPatience)
    rig = Rig(stored((16, 48)), [columns(2)], 2, deadline_s=10.0)
    result = rig.restore(0)
    rig.check({0: result})
    assert any("process 1 did not say where it is" in words for words in result.tally.rejected)


def test_a_process_that_restores_something_else_is_left_out_at_once() -> None:
    rig = Rig(stored((16, 48)), [columns(3)], 3, deadline_s=30.0)
    other = Rig(rig.stored, [replicated(3)], 3, deadline_s=30.0)
    other.board = rig.board
    found: dict[int, object] = {}
    thread = threading.Thread(target=lambda: found.update(other.restore_all([2])))
    thread.start()
    results = rig.restore_all([0, 1])
    thread.join(10)
    assert not thread.is_alive()
    rig.check(results)
    other.check(found)  # type: ignore[arg-type]
    assert any("takes no part" in w for r in results.values() for w in r.tally.rejected)


def test_a_process_that_gave_up_before_is_not_waited_for() -> None:
    rig = Rig(stored((16, 48)), [columns(3)], 3, deadline_s=30.0)
    rig.exchange(1).close()
    rig.check(rig.restore_all([0, 2]))


def test_a_damaged_chunk_is_damaged_for_all_who_need_it() -> None:
    rig = Rig(stored((16, 48)), [columns(2)], 2)
    rig.stored.damaged = {(0, (1, 0))}
    errors: list[BaseException] = []

    def restore(process: int) -> None:
        try:
            rig.restore(process)
        except CheckpointInvalid as error:
            errors.append(error)

    threads = [threading.Thread(target=restore, args=(p,)) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert rig.stored.reads[0, (0, 0)] == 1


@pytest.mark.parametrize("_turn", range(20))
def test_who_fails_while_it_goes_to_another_leaves_nobody_waiting(_turn: int) -> None:
    rig = Rig(stored((16, 48)), [columns(2)], 2, deadline_s=3600.0)
    rig.stored.damaged = {(0, (0, 0)), (0, (1, 0))}
    before = set(threading.enumerate())

    def restore(process: int) -> None:
        with contextlib.suppress(CheckpointInvalid):
            rig.restore(process)

    threads = [threading.Thread(target=restore, args=(p,), daemon=True) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("everstep-give")]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)


# One who speaks the protocol, and misbehaves.

Told = dict[str, Any]
"""What process 0 tells the others: where it is, and what lets them in."""


class Impostor:
    """Process 1 of two, which gives whatever a test says."""

    def __init__(
        self,
        rig: Rig,
        behave: Callable[[Wire, Rig], None],
        before: Callable[[Told], None] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            rig: with process 0, which restores.
            behave: what process 1 does once it has come to process 0 and said who it is.
            before: what is done at the door of process 0 before that.
        """
        self.rig = rig
        self._server = socket.create_server(("127.0.0.1", 0))
        self._behave, self._before = behave, before
        self._sockets: list[socket.socket] = [self._server]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        told = json.loads(self.rig.board.get(f"{KEY}/0", 10))
        own = {**told, "port": self._server.getsockname()[1]}
        self.rig.board.put(f"{KEY}/1", json.dumps(own))
        self._before(told)
        connection = socket.create_connection((told["address"], told["port"]))
        self._sockets.append(connection)
        wire = Wire(connection, "process 0", 10.0, SystemClock())
        try:
            wire.introduce(1, told["token"], told["agreement"])
            self._behave(wire, self.rig)
        except PeerUnavailable:
            return

    def close(self) -> None:
        """End, after all that it was told to do."""
        self._thread.join(30)
        for one in self._sockets:
            one.close()
        assert not self._thread.is_alive()


def _says_nothing(wire: Wire, rig: Rig) -> None:
    del wire, rig


def _hangs_in_the_middle(wire: Wire, rig: Rig) -> None:
    wire.tell(Header(Kind.PART, _first_of_its(rig), 0, 16 * 24 * 4))


def _goes_away_in_the_middle(wire: Wire, rig: Rig) -> None:
    _hangs_in_the_middle(wire, rig)
    wire.close()


def _ends_without_giving(wire: Wire, rig: Rig) -> None:
    del rig
    wire.tell(Header(Kind.DONE))


def _gives_what_nobody_expects(wire: Wire, rig: Rig) -> None:
    del rig
    wire.give(4_000_000, 0, np.zeros(4))


def _gives_too_much(wire: Wire, rig: Rig) -> None:
    wire.give(_first_of_its(rig), 0, np.zeros((16, 25), np.float32))


def _speaks_another_language(wire: Wire, rig: Rig) -> None:
    del rig
    wire.tell(Header(99))  # type: ignore[arg-type]


def _gives_bytes_with_another_checksum(wire: Wire, rig: Rig) -> None:
    chunk = _first_of_its(rig)
    values = rig.stored.arrays[0][chunk * 16 : chunk * 16 + 16, :24].copy()

    class Liar(Wire):
        """Changes a bit after the checksum was computed."""

        def _send(self, data: bytes | memoryview) -> None:
            changed = bytearray(data)
            if len(changed) == values.nbytes:
                changed[100] ^= 1
            super()._send(bytes(changed))

    wire.__class__ = Liar
    wire.give(chunk, 0, values)
    wire.tell(Header(Kind.DONE))


def _refuses_everything(wire: Wire, rig: Rig) -> None:
    for chunk in _its(rig):
        wire.tell(Header(Kind.REFUSED, chunk, 0))
    wire.tell(Header(Kind.DONE))


def _its(rig: Rig) -> list[int]:
    from everstep.runtime.layout.manifest import Region
    from everstep.runtime.restore.division import divide_reads

    needs = {p: [Region(0, box) for box in boxes] for p, boxes in rig.everybody[0].items()}
    division = divide_reads(needs, {0: rig.stored.chunks[0]}, rig.tree)
    return [at for at, chunk in enumerate(division.shared) if chunk.reader == 1]


def _first_of_its(rig: Rig) -> int:
    return _its(rig)[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.mark.parametrize(
    "behave",
    [
        _says_nothing,
        _hangs_in_the_middle,
        _goes_away_in_the_middle,
        _ends_without_giving,
        _gives_what_nobody_expects,
        _gives_too_much,
        _speaks_another_language,
        _gives_bytes_with_another_checksum,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_whatever_a_giver_does_the_bytes_are_right_and_it_is_named(
    behave: Callable[[Wire, Rig], None], stack: ExitStack
) -> None:
    rig = Rig(stored((16, 48)), [columns(2)], 2, deadline_s=0.5)
    stack.callback(Impostor(rig, behave).close)
    result = rig.restore(0)
    rig.check({0: result})
    assert [w for w in result.tally.rejected if "process 1" in w]


def test_what_a_giver_could_not_read_is_read_without_blaming_it(stack: ExitStack) -> None:
    rig = Rig(stored((16, 48)), [columns(2)], 2, deadline_s=5.0)
    stack.callback(Impostor(rig, _refuses_everything).close)
    result = rig.restore(0)
    rig.check({0: result})


def _gives_its_share(wire: Wire, rig: Rig) -> None:
    for chunk in _its(rig):
        wire.give(chunk, 0, rig.stored.arrays[0][chunk * 16 : chunk * 16 + 16, :24])
    wire.tell(Header(Kind.DONE))


def test_a_stranger_gets_nothing_in(stack: ExitStack) -> None:
    # It says that it is process 1 before that one comes, and gives what process 0 waits for.
    rig = Rig(stored((16, 48)), [columns(2)], 2)
    was_refused: list[bool] = []

    def knock(told: Told) -> None:
        with socket.create_connection((told["address"], told["port"])) as stranger:
            wire = Wire(stranger, "the door", 20.0, SystemClock())
            try:
                wire.introduce(1, "a guess", told["agreement"])
                for chunk in _its(rig):
                    wire.give(chunk, 0, np.full((16, 24), -1, np.float32))
                wire.tell(Header(Kind.DONE))
                was_refused.append(stranger.recv(1) == b"")
            except (PeerUnavailable, ConnectionError):
                was_refused.append(True)

    stack.callback(Impostor(rig, _gives_its_share, before=knock).close)
    result = rig.restore(0)
    rig.check({0: result})
    # Process 1 comes after the knock, and what it gave is here: so the knock is over.
    assert was_refused == [True]
    assert not result.tally.rejected


def test_a_taker_that_does_not_take_holds_nobody_up_for_longer_than_the_deadline(
    stack: ExitStack,
) -> None:
    shape = (256, 4096)
    arrays = stored((8, 4096), shape=shape)
    rig = Rig(arrays, [columns(2, shape)], 2, deadline_s=2.0, memory_bytes=1 << 20)
    stack.callback(Impostor(rig, _says_nothing).close)
    result = rig.restore(0)
    rig.check({0: result})
    assert any("silent" in words for words in result.tally.rejected)
