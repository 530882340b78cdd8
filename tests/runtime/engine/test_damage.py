"""Any file of a step or of the ledger is damaged: it is found and named, or does no harm. Nothing
is ever restored that was not saved, and nobody is told that there is nothing."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import everstep.runtime as es
from damaged_files import exchanged, files_below, flipped, holding, shortened
from everstep.runtime.cli.main import app
from everstep.runtime.errors import CheckpointInvalid, ManifestCorrupt
from quick_folder import quick_folder
from tiny_parts import like, make_run, parts_of, step_of

FLIPS = 300
HARMLESS = (
    # For Orbax's eyes, and nothing of ours rests on it.
    r"commit_success\.txt",
    # Merged by reference: the index of a writer's own database is not read again.
    r"\w+/ocdbt\.process_0/manifest\.ocdbt",
)
PARTLY_HARMLESS = (r"\w+/ocdbt\.process_0/d/\w+",)
"""Behind a writer's values lies the index of his own database."""


@pytest.fixture(scope="module")
def run() -> Iterator[Path]:
    """Two steps: the second one is damaged, the first is what is left."""
    with quick_folder() as folder:
        made = folder / "run"
        make_run(made, es.Retention(latest=2), 1, 2)
        yield made


def newest(run: Path) -> Path:
    (found,) = run.glob("step-0000000002-*")
    return found


class Found:
    """What a reader and the command line make of a run at this moment."""

    def __init__(self, run: Path, log: pytest.LogCaptureFixture) -> None:
        log.clear()
        self.step: int | None = None
        self.words = ""
        with es.Checkpoints(run) as reader:
            try:
                self.step = step_of(reader.restore(like()))
            except CheckpointInvalid as error:
                self.words = str(error)
        self.words += log.text
        verified = CliRunner().invoke(app, ["verify", str(run), "--step", "2"])
        assert verified.exit_code in (0, 1), verified.output
        self.is_verified = verified.exit_code == 0
        self.verified_words = verified.output

    @property
    def is_caught(self) -> bool:
        return self.step != 2

    def check(self, path: str, names: tuple[str, ...]) -> None:
        """It was found by both and named, or by none of them."""
        assert self.is_verified is not self.is_caught, (path, self.words, self.verified_words)
        if not self.is_caught:
            return
        for words in (self.words, self.verified_words.replace("\n", "")):
            assert any(name in words for name in names), (path, names, words)
            if "ocdbt.process_0/d/" in path:
                # A chunk is named by its leaf and by the file that it lies in.
                assert path in words, (path, words)
                assert any(name in words for name in names[1:]), (path, words)


def names_in_words(path: str) -> tuple[str, ...]:
    """What a damaged file of a step may be called: itself, or the leaves that lie in it."""
    item = path.split("/", maxsplit=1)[0]
    leaves = {"model": ("['w']", "['b']"), "optimizer": ("['mu']",)}
    return (path, *(leaves.get(item, ()) if "/d/" in path or path.endswith("ocdbt") else ()))


def may_be_harmless(path: str) -> bool:
    return any(re.fullmatch(p, path) for p in (*HARMLESS, *PARTLY_HARMLESS))


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_step_is_found_or_harmless(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(11)
    folder = newest(run)
    files = [found for found in files_below(folder) if found.stat().st_size]
    caught: Counter[str] = Counter()
    for _, file in zip(range(FLIPS), itertools.cycle(files), strict=False):
        path = str(file.relative_to(folder))
        with holding(file, flipped(file.read_bytes(), dice)):
            found = Found(run, caplog)
        found.check(path, names_in_words(path))
        if found.is_caught:
            # An older step is used, and that is said.
            assert found.step == 1
            assert "step 2 is passed over" in found.words
            caught[path] += 1
        else:
            assert may_be_harmless(path), path
    for file in files:
        path = str(file.relative_to(folder))
        if not any(re.fullmatch(p, path) for p in HARMLESS):
            assert caught[path], path
    assert sum(caught.values()) > FLIPS * 2 // 3
    assert not Found(run, caplog).is_caught


def test_a_flipped_bit_anywhere_in_the_ledger_is_no_empty_ledger(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dice = random.Random(12)
    entries = files_below(run / "_everstep")
    assert len(entries) == 3
    for entry in entries * 14:
        with holding(entry, flipped(entry.read_bytes(), dice)):
            _check_unreadable_ledger(run, entry, caplog)
    for entry in entries:
        for data in shortened(entry.read_bytes()):
            # The last one missing is a run that has not come so far; any other is a gap.
            if data is None and entry == entries[-1]:
                continue
            if data is not None and data == entry.read_bytes().rstrip(b"\n"):
                continue
            with holding(entry, data):
                _check_unreadable_ledger(run, entry, caplog)
    for first, second in itertools.combinations(entries, 2):
        with exchanged(first, second):
            _check_unreadable_ledger(run, first, caplog)
        with holding(second, first.read_bytes()):
            _check_unreadable_ledger(run, second, caplog)
    assert not Found(run, caplog).is_caught


def _check_unreadable_ledger(run: Path, entry: Path, log: pytest.LogCaptureFixture) -> None:
    with es.Checkpoints(run) as checkpoints:
        for act in (
            checkpoints.steps,
            checkpoints.latest,
            lambda: checkpoints.restore(like()),
            lambda: checkpoints.restore(like(), 1),
            lambda: checkpoints.save(3, parts_of(3)),
        ):
            with pytest.raises(ManifestCorrupt, match=entry.name):
                act()
    verified = CliRunner().invoke(app, ["verify", str(run), "--all"])
    assert verified.exit_code == 1
    assert entry.name in verified.output.replace("\n", "")
    assert len(list(run.glob("step-*"))) == 2
    assert not log.records


@pytest.mark.slow
def test_a_shortened_missing_swapped_or_doubled_file_is_found_or_harmless(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = newest(run)
    files = files_below(folder)
    (older,) = run.glob("step-0000000001-*")
    for file in files:
        path = str(file.relative_to(folder))
        good = file.read_bytes()
        tried = [data for data in shortened(good) if data != good]
        # The file of the same name of another step, sound in itself; and each other file's content.
        other = older / path
        if other.exists():
            tried.append(other.read_bytes())
        tried.append(files[files.index(file) - 1].read_bytes())
        for data in tried:
            if data == good:
                continue
            with holding(file, data):
                found = Found(run, caplog)
            found.check(path, names_in_words(path))
            assert found.is_caught or may_be_harmless(path), path
            assert found.step in (1, 2)
    # Two sound files of one kind change places.
    kinds = {
        "of two items": ("model/ocdbt.process_0/d/*", "optimizer/ocdbt.process_0/d/*"),
        "of two indexes": ("model/manifest.ocdbt", "optimizer/manifest.ocdbt"),
        "of two records": ("everstep.model_0.json", "everstep.optimizer_0.json"),
        "of two trees": ("model/_METADATA", "optimizer/_METADATA"),
        "of two kinds": ("settings/metadata", "raw/data"),
    }
    for first, second in kinds.values():
        (left,), (right,) = folder.glob(first), folder.glob(second)
        with exchanged(left, right):
            found = Found(run, caplog)
        names = [str(side.relative_to(folder)) for side in (left, right)]
        assert found.step == 1, names
        found.check(names[0], names_in_words(names[0]) + names_in_words(names[1]))
    # A file too many is nobody's.
    doubled = folder / "model" / "d" / "0123456789abcdef"
    doubled.write_bytes(b"more")
    assert Found(run, caplog).step == 2
    doubled.unlink()


def test_when_every_step_is_damaged_it_is_an_error_that_names_all(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (older,) = run.glob("step-0000000001-*")
    with holding(newest(run) / "everstep.json", None), holding(older / "settings/metadata", b"{}"):
        found = Found(run, caplog)
        assert found.step is None
        assert "everstep.json" in found.words
        assert "settings/metadata" in found.words
        with es.Checkpoints(run) as checkpoints:
            # And nothing is begun anew over it.
            with pytest.raises(es.ConfigurationError, match="more than 2"):
                checkpoints.save(0, parts_of(0))
            assert checkpoints.steps() == (1, 2)
