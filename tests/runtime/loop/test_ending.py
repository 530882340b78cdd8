from __future__ import annotations

import jax
import pytest

from everstep.runtime.agent.link import EndKind
from everstep.runtime.errors import ConfigurationError, Fenced, PeerUnavailable, StateRefused
from everstep.runtime.loop.ending import MESSAGE_LENGTH_MAX, Leave, Verdict, judge

GLOO = jax.errors.JaxRuntimeError(
    "INTERNAL: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer"
)


def judged(
    error: BaseException | None, *, is_finished: bool = False, is_alone: bool = False
) -> Verdict:
    return judge(error, step=4, is_finished=is_finished, is_alone=is_alone)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001 - any kind is tested.
        return caught


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        pytest.param(None, EndKind.EXITED_EARLY, "after step 4", id="returned early"),
        pytest.param(Leave(4), EndKind.LEFT, "", id="left"),
        pytest.param(SystemExit(0), EndKind.EXITED_EARLY, "sys.exit(0)", id="sys.exit(0)"),
        pytest.param(SystemExit(), EndKind.EXITED_EARLY, "sys.exit(None)", id="sys.exit()"),
        pytest.param(SystemExit(3), EndKind.USER_ERROR, "sys.exit(3)", id="sys.exit(3)"),
        pytest.param(SystemExit("why"), EndKind.USER_ERROR, "'why'", id="sys.exit(text)"),
        pytest.param(ValueError("x"), EndKind.USER_ERROR, "ValueError: x", id="user"),
        pytest.param(KeyError(), EndKind.USER_ERROR, "KeyError", id="no text"),
        pytest.param(KeyboardInterrupt(), EndKind.USER_ERROR, "Keyboard", id="interrupt"),
        pytest.param(GLOO, EndKind.COLLECTIVE_ERROR, "Gloo", id="collective"),
        pytest.param(
            Fenced(own=3, newest=4, where="ledger"), EndKind.FENCED, "incarnation 4", id="fenced"
        ),
        pytest.param(StateRefused("w", "f4", "f8"), EndKind.STATE_REFUSED, "w: found", id="state"),
        pytest.param(
            ConfigurationError("spec.checkpoint.snapshot.memory", "1", "2"),
            EndKind.STATE_REFUSED,
            "snapshot.memory",
            id="snapshot memory",
        ),
        pytest.param(
            ConfigurationError("batch_size", 7, "8"), EndKind.USER_ERROR, "batch_size", id="misuse"
        ),
        pytest.param(PeerUnavailable("no"), EndKind.STARTUP_FAILED, "no", id="retryable"),
    ],
)
def test_an_end_is_judged_by_what_train_did(
    error: BaseException | None, kind: EndKind, says: str
) -> None:
    verdict = judged(error)
    assert verdict.kind is kind
    assert says in verdict.message
    assert "\n" not in verdict.message


def test_all_steps_done_is_done() -> None:
    assert judged(None, is_finished=True).kind is EndKind.DONE


def test_only_a_users_own_error_has_a_traceback() -> None:
    assert "ValueError: mine" in judged(raised(ValueError("mine"))).traceback
    assert judged(raised(GLOO)).traceback == ""


def test_a_consequence_is_known_through_what_the_user_wrapped_it_in() -> None:
    wrapped = raised(RuntimeError("step failed"), cause=GLOO)
    assert judged(wrapped).kind is EndKind.COLLECTIVE_ERROR


def test_a_user_error_that_mentions_gloo_is_still_the_users() -> None:
    assert judged(ValueError("gloo is a bird")).kind is EndKind.USER_ERROR


LOST_PEER = [
    (
        "UNKNOWN: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection "
        "closed by peer [127.0.0.1]:40211"
    ),
    (
        "INTERNAL: Gloo AllGather failed: [gloo/transport/tcp/pair.cc:547] Read error "
        "[127.0.0.1]:40211: Connection reset by peer"
    ),
    (
        "INTERNAL: Gloo ReduceScatter failed: [gloo/transport/tcp/unbound_buffer.cc:81] "
        "Timed out waiting 600000ms for recv operation to complete"
    ),
    "UNKNOWN: Gloo all-to-all failed: Socket closed [127.0.0.1]:40211",
    "FAILED_PRECONDITION: Gloo collective permute failed: Broken pipe",
    "UNKNOWN: Gloo context initialization failed: Connection refused",
    (
        "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was "
        "preempted/died/restarted unexpectedly or this task is experiencing network issues."
    ),
    "CANCELLED: Coordination service has stopped. RecordHeartbeat() from task: 1",
    (
        "ABORTED: Polled an error from coordination service (this can be an error from this or "
        "another task)."
    ),
]


@pytest.mark.parametrize("error_type", [jax.errors.JaxRuntimeError, ValueError, RuntimeError])
@pytest.mark.parametrize("said", LOST_PEER)
def test_a_status_of_jaxlib_about_a_lost_peer_is_a_consequence_whatever_its_type(
    said: str, error_type: type[Exception]
) -> None:
    verdict = judged(raised(error_type(said)))
    assert verdict.kind is EndKind.COLLECTIVE_ERROR
    assert verdict.traceback == ""
    wrapped = judged(raised(KeyError("loss"), cause=error_type(said)))
    assert wrapped.kind is EndKind.COLLECTIVE_ERROR


@pytest.mark.parametrize(
    "said", ["UNAVAILABLE: Socket closed", "INTERNAL: Connection reset by peer"]
)
def test_words_about_a_connection_are_a_consequence_only_in_an_error_of_jax(said: str) -> None:
    assert judged(jax.errors.JaxRuntimeError(said)).kind is EndKind.COLLECTIVE_ERROR
    # What reads the user's data from afar raises such errors of its own.
    assert judged(ValueError(said)).kind is EndKind.USER_ERROR


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom of rank 1"),
        ValueError("the Gloo all-reduce failed: Connection closed by peer"),
        ValueError("INVALID_ARGUMENT: the shape (3,) does not fit"),
        ValueError('NOT_FOUND: Error opening "zarr" driver: Metadata does not exist'),
        OSError("UNAVAILABLE: all-reduce: Connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError("Timed out waiting for the loader"),
    ],
)
def test_an_error_with_other_words_is_the_users(error: Exception) -> None:
    verdict = judged(raised(error))
    assert verdict.kind is EndKind.USER_ERROR
    assert str(error) in verdict.traceback


def test_alone_nothing_is_another_members_fault() -> None:
    assert judged(raised(GLOO), is_alone=True).kind is EndKind.USER_ERROR


def test_an_out_of_memory_of_xla_is_not_a_consequence() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 GiB")
    assert judged(raised(error)).kind is EndKind.USER_ERROR


def test_a_message_is_one_line_of_bounded_length_and_the_traceback_is_whole() -> None:
    verdict = judged(raised(ValueError("word\n" * 1000)))
    assert len(verdict.message) == MESSAGE_LENGTH_MAX
    assert verdict.traceback.count("word") == 1000
