from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.controller.reconcile.queue import Backoff, Queue


def _take_all(queue: Queue, now_s: float) -> list[str]:
    taken: list[str] = []
    while True:
        queue, key = queue.take(now_s)
        if key is None:
            return taken
        taken.append(key)


def test_a_key_that_is_added_twice_is_taken_once() -> None:
    queue = Queue().add("a", 1.0).add("b", 2.0).add("a", 3.0)
    assert _take_all(queue, 10.0) == ["a", "b"]


def test_adding_makes_a_key_earlier_and_never_later() -> None:
    queue = Queue().add("a", 5.0)
    assert queue.add("a", 9.0).next_due_s() == 5.0
    assert queue.add("a", 2.0).next_due_s() == 2.0


def test_nothing_is_taken_before_it_is_due() -> None:
    queue = Queue().add("a", 5.0)
    same, key = queue.take(4.9)
    assert (same, key) == (queue, None)
    assert queue.take(5.0)[1] == "a"


def test_a_key_added_while_its_pass_runs_is_taken_again() -> None:
    queue, key = Queue().add("a", 0.0).take(0.0)
    assert key == "a"
    assert _take_all(queue.add("a", 0.0), 0.0) == ["a"]


def test_each_failure_in_a_row_doubles_the_delay_up_to_the_bound() -> None:
    queue = Queue(backoff=Backoff(first_s=1.0, factor=2.0, max_s=5.0))
    delays: list[float] = []
    for _ in range(5):
        queue = queue.fail("a", 100.0)
        due_s = queue.next_due_s()
        assert due_s is not None
        delays.append(due_s - 100.0)
        queue, _ = queue.take(due_s)
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_success_starts_the_delay_over() -> None:
    queue = Queue(backoff=Backoff(first_s=1.0))
    for _ in range(3):
        queue, _ = queue.fail("a", 0.0).take(1000.0)
    queue = queue.succeed("a").fail("a", 0.0)
    assert queue.next_due_s() == 1.0
    untouched = Queue()
    assert untouched.succeed("a") is untouched


def test_a_forgotten_key_never_comes_back() -> None:
    queue = Queue().add("a", 0.0).fail("a", 0.0).forget("a")
    assert queue.next_due_s() is None
    assert not queue.failures


def test_a_year_of_failures_does_not_overflow_the_delay() -> None:
    assert Backoff(max_s=30.0).delay_s(10**9) == 30.0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(min_value=0, max_value=100)), max_size=30)
)
def test_every_key_is_taken_exactly_once_in_the_order_of_its_earliest_time(
    adds: list[tuple[str, float]],
) -> None:
    queue = Queue()
    earliest: dict[str, float] = {}
    for key, at_s in adds:
        queue = queue.add(key, at_s)
        earliest[key] = min(at_s, earliest.get(key, at_s))
    expected = [key for _, key in sorted((at_s, key) for key, at_s in earliest.items())]
    assert _take_all(queue, 100.0) == expected
