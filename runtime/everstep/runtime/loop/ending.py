"""How a training ended, judged from what `train` raised or returned."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from everstep.runtime.agent.link import EndKind
from everstep.runtime.errors import ConfigurationError, Fenced, Retryable, StateRefused

# How the collectives and the coordination service of JAX say that another member is gone. They
# come as one exception type for everything, so the text has to be read.
_CONSEQUENCE = re.compile(
    r"gloo|connection (closed|reset|refused)|broken pipe|socket closed|coordination service"
    r"|heartbeat|nccl|task .* (disconnected|failed)|preempted|stopped (the )?collective"
    r"|collective .*(timed out|timeout)|barrier .*(failed|timed out)",
    re.IGNORECASE,
)
_COLLECTIVE_TYPES = frozenset({"JaxRuntimeError", "XlaRuntimeError", "ProcessFailureError"})

# Where jaxlib passes a status on without its own type, it is one of these, and the text is the
# status: a code, and then who says it. Tensorstore raises its statuses so too, and they tell of
# connections as well, so only what speaks of the members themselves counts here.
_PLAIN_TYPES = (ValueError, RuntimeError)
_STATUS_OF_MEMBERS = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
    r".*(\bgloo\b|\bnccl|coordination service|coordination agent|/job:jax_worker)",
    re.IGNORECASE | re.DOTALL,
)
MESSAGE_LENGTH_MAX = 400


class Leave(BaseException):  # It must pass through the user's `except Exception`.
    """Raised in `run.step_done` at the agreed step: the incarnation ends here, by request.

    Everything of this step is held already. Let it pass; `finally` blocks run.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        super().__init__(f"leaving the incarnation after step {step}, as asked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    kind: EndKind
    message: str
    traceback: str = ""
    """Whole, for the log; empty where a line says it all."""


def judge(error: BaseException | None, *, step: int, is_finished: bool, is_alone: bool) -> Verdict:
    """Judge one end of `train`.

    Args:
        error: what it raised; None when it returned.
        step: last finished step.
        is_finished: all of `run.steps` is done.
        is_alone: no other process takes part, so nothing can be another's consequence.
    """
    match error:
        case None if is_finished:
            return Verdict(kind=EndKind.DONE, message="")
        case None:
            return Verdict(
                kind=EndKind.EXITED_EARLY,
                message=f"train returned after step {step}, before the last step of run.steps",
            )
        case Leave():
            return Verdict(kind=EndKind.LEFT, message="")
        case SystemExit():
            return _judge_exit(error, step)
        case Fenced():
            return Verdict(kind=EndKind.FENCED, message=line_of(error))
        case StateRefused():
            return Verdict(kind=EndKind.STATE_REFUSED, message=line_of(error))
        case ConfigurationError() if error.field.startswith("spec."):
            return Verdict(kind=EndKind.STATE_REFUSED, message=line_of(error))
        case Retryable():
            return Verdict(kind=EndKind.STARTUP_FAILED, message=line_of(error))
        case _ if not is_alone and is_consequence(error):
            return Verdict(kind=EndKind.COLLECTIVE_ERROR, message=line_of(error))
        case _:
            return Verdict(
                kind=EndKind.USER_ERROR, message=line_of(error), traceback=trace_of(error)
            )


def _judge_exit(error: SystemExit, step: int) -> Verdict:
    said = f"the program called sys.exit({error.code!r}) after step {step}"
    if error.code in (None, 0):
        return Verdict(kind=EndKind.EXITED_EARLY, message=said)
    return Verdict(kind=EndKind.USER_ERROR, message=said)


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another member is gone."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _says_that_a_member_is_gone(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def _says_that_a_member_is_gone(error: BaseException) -> bool:
    if type(error).__name__ in _COLLECTIVE_TYPES:
        return _CONSEQUENCE.search(str(error)) is not None
    # The very types: one of the user's that derives from them is none of jaxlib's.
    return type(error) in _PLAIN_TYPES and _STATUS_OF_MEMBERS.match(str(error)) is not None


def line_of(error: BaseException) -> str:
    """The error as one line for people."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= MESSAGE_LENGTH_MAX else line[: MESSAGE_LENGTH_MAX - 1] + "…"


def trace_of(error: BaseException) -> str:
    """The whole traceback, causes included, from the user's `train` on.

    Our own frames above it (worker, main) say nothing about the user's fault and are left out.
    """
    frames = traceback.TracebackException.from_exception(error)
    while frames.stack and "/everstep/runtime/loop/" in frames.stack[0].filename:
        frames.stack.pop(0)
    return "".join(frames.format())
