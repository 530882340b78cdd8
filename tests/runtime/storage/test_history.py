"""What the ledger's entries mean, without any storage."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.controller.api.ids import Incarnation, Step
from everstep.runtime.errors import ManifestCorrupt
from everstep.runtime.storage.history import (
    Claim,
    Committed,
    Dropped,
    Entry,
    Refusal,
    Started,
    all_commits,
    decode,
    encode,
    judge_claim,
    live_commits,
    superseded_commits,
)


def history(*words: str) -> list[Entry]:
    """`a1` claims for job a; `10` commits a step; `-10` drops it."""
    entries: list[Entry] = []
    claim, incarnation = 0, Incarnation(0)
    for number, word in enumerate(words, 1):
        if word[0].isalpha():
            claim, incarnation = number, Incarnation(int(word[1:]))
            entries.append(Started(number=number, job_uid=word[0], incarnation=incarnation))
        elif word[0] == "-":
            step = Step(int(word[1:]))
            folder = next(c.folder for c in reversed(all_commits(entries)) if c.step == step)
            entries.append(Dropped(number=number, claim=claim, step=step, folder=folder))
        else:
            entries.append(
                Committed(
                    number=number,
                    claim=claim,
                    step=Step(int(word)),
                    incarnation=incarnation,
                    folder=f"f{number}",
                    digest="",
                    committed_at_s=0.0,
                )
            )
    return entries


def steps(*words: str) -> list[int]:
    return [commit.step for commit in live_commits(history(*words))]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("a1", []),
        ("a1 10 20", [10, 20]),
        ("a1 9000 10000 99999 100000", [9000, 10000, 99999, 100000]),
        ("a1 20 10", [10, 20]),
        ("a1 10 20 30 -20", [10, 30]),
        ("a1 10 20 a2 15", [10, 15]),
        ("a1 10 20 a2 20", [10, 20]),
        ("a1 10 20 a2 20 -20", [10]),
        ("a1 10 20 a2", [10, 20]),
        ("a1 10 20 a2 5", [5]),
        ("a1 10 20 b1 30", [10, 20, 30]),
        ("a1 15 a2 16 17 20", [15, 16, 17, 20]),
    ],
    ids=lambda value: value.replace(" ", ",") if isinstance(value, str) else "",
)
def test_the_steps_that_exist(words: str, left: list[int]) -> None:
    # C5
    assert steps(*words.split()) == left


def test_a_replaced_step_is_the_newer_one_and_the_older_is_superseded() -> None:
    entries = history("a1", "10", "20", "a2", "20")
    assert [c.folder for c in live_commits(entries)] == ["f2", "f5"]
    assert [c.folder for c in superseded_commits(entries)] == ["f3"]


def test_commits_know_their_job() -> None:
    assert [c.job_uid for c in live_commits(history("a1", "10", "b1", "20"))] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "claimant", "verdict"),
    [
        ("", "a1", "new"),
        ("a1", "a1", "same"),
        ("a1", "a2", "new"),
        ("a7", "a6", "refused"),
        ("a7", "b1", "new"),
        ("a7 b1", "a7", "refused"),
        ("a7 b1", "a8", "refused"),
        ("a7 b1 c1", "b2", "refused"),
        ("a7 b1", "b1", "same"),
        ("a7 b1 10", "b2", "new"),
    ],
)
def test_who_may_claim(words: str, claimant: str, verdict: str) -> None:
    # C3, C4
    found = judge_claim(
        history(*words.split()), job_uid=claimant[0], incarnation=Incarnation(int(claimant[1:]))
    )
    kinds: dict[type, str] = {type(None): "new", Claim: "same", Refusal: "refused"}
    assert kinds[type(found)] == verdict


_WORDS = st.lists(
    st.one_of(
        st.integers(1, 30).map(str),
        st.just("next"),
    ),
    max_size=20,
)


@given(_WORDS)
def test_what_exists_grows_in_step_and_number_of_claim_at_once(words: list[str]) -> None:
    # C5, for any sequence of commits over any incarnations
    count = itertools.count(2)
    entries = history("a1", *(f"a{next(count)}" if word == "next" else word for word in words))
    live = live_commits(entries)
    assert [c.step for c in live] == sorted({c.step for c in live})
    assert [c.claim for c in live] == sorted(c.claim for c in live)
    everything = {c.number for c in all_commits(entries)}
    assert {c.number for c in live} | {c.number for c in superseded_commits(entries)} == everything
    if everything:
        newest = max(all_commits(entries), key=lambda c: (c.claim, c.step, c.number))
        assert live[-1] == newest


@pytest.mark.parametrize("entry", history("a1", "10", "-10"), ids=lambda e: type(e).__name__)
def test_any_altered_byte_of_an_entry_is_found(entry: Entry) -> None:
    data = encode(entry)
    assert decode(data, number=entry.number, where="x") == entry
    for position in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[position] ^= 1 << bit
            # White space outside of the checksummed text says nothing, so both are right.
            with contextlib.suppress(ManifestCorrupt):
                assert decode(bytes(altered), number=entry.number, where="x") == entry


@pytest.mark.parametrize("length", [0, 1, 20, -2])
def test_a_torn_entry_is_corrupt(length: int) -> None:
    data = encode(history("a1")[0])
    with pytest.raises(ManifestCorrupt):
        decode(data[:length], number=1, where="x")


def test_an_entry_under_another_number_is_corrupt() -> None:
    with pytest.raises(ManifestCorrupt, match="number 2"):
        decode(encode(history("a1")[0]), number=2, where="x")
