"""What an object store's answers mean."""

from __future__ import annotations

import pytest

from everstep.runtime.storage.answers import (
    PATIENCE,
    Refused,
    Trouble,
    judge_status,
    retry_after,
)


@pytest.mark.parametrize(
    ("status", "words", "trouble"),
    [
        (429, "", Trouble.THROTTLED),
        (408, "", Trouble.CONNECTION),
        (500, "", Trouble.SERVER),
        (503, "", Trouble.SERVER),
        (302, "", Trouble.SERVER),
        (400, "Provided CRC32C does not match", Trouble.ALTERED),
    ],
)
def test_what_may_pass_is_asked_for_again(status: int, words: str, trouble: Trouble) -> None:
    assert judge_status(status, words) is trouble


@pytest.mark.parametrize(
    ("status", "named"), [(401, "credentials"), (403, "objectUser"), (400, "what"), (451, "what")]
)
def test_a_refusal_says_what_would_do_and_the_servers_own_words(status: int, named: str) -> None:
    judged = judge_status(status, "because I say so")
    assert isinstance(judged, Refused)
    assert named in judged.remedy
    assert str(status) in judged.found
    assert "because I say so" in judged.found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3.0),
        (" 10 ", 10.0),
        ("-1", None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_in_seconds_is_understood_and_nothing_else(
    text: str | None, seconds: float | None
) -> None:
    assert retry_after(text) == seconds


def test_every_trouble_has_a_bound() -> None:
    assert set(PATIENCE) == set(Trouble)
    assert all(2 <= one.attempts <= 20 and one.most_s <= 60 for one in PATIENCE.values())
