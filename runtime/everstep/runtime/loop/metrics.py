"""Metrics on their way from the device to the ring, without waiting for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, cast

from everstep.runtime.agent.control import ControlBlock
from everstep.runtime.agent.link import METRICS_PER_STEP_MAX
from everstep.runtime.errors import ConfigurationError, InvariantViolated

PENDING_MAX = 2
"""Steps whose metrics may be outstanding. One more, and the oldest is waited for: the program then
runs at most this many steps ahead of the device, and `STEP_DONE` is never far from the truth."""

SHOWN_MAX = 60


class MetricsFeed:
    """Takes each step's metrics, writes them in step order once they are on the host."""

    def __init__(
        self, control: ControlBlock, name_metrics: Callable[[tuple[str, ...]], None]
    ) -> None:
        self._control = control
        self._name_metrics = name_metrics
        self._names: tuple[str, ...] | None = None
        self._pending: deque[tuple[int, tuple[Any, ...]]] = deque()

    def add(self, step: int, metrics: object) -> None:
        """Take the metrics of a step: numbers, or scalar arrays that may not be computed yet.

        Raises:
            ConfigurationError: they are no mapping, not the names of the step before, or one of
                an earlier step is no number.

        Blocking: not, unless `PENDING_MAX` earlier steps are still being computed.
        """
        if not isinstance(metrics, Mapping):
            raise ConfigurationError(
                "metrics", _described(metrics), 'a mapping of names to numbers: {"loss": loss}'
            )
        given = cast("Mapping[str, Any]", metrics)
        names = tuple(given)
        if names != self._names:
            self._name(names)
        self._pending.append((step, tuple(given.values())))
        while self._pending and (len(self._pending) > PENDING_MAX or self._is_ready()):
            self._write_oldest()

    def drain(self) -> None:
        """Write all that is outstanding. Blocking: until the device has computed it."""
        while self._pending:
            self._write_oldest()

    def _is_ready(self) -> bool:
        return all(not hasattr(v, "is_ready") or v.is_ready() for v in self._pending[0][1])

    def _write_oldest(self) -> None:
        step, values = self._pending.popleft()
        try:
            numbers = tuple(map(float, values))
        except (TypeError, ValueError) as error:
            raise self._no_number(step, values) from error
        self._control.record(step, numbers)

    def _no_number(self, step: int, values: tuple[Any, ...]) -> ConfigurationError:
        for name, value in zip(self._names or (), values, strict=True):
            try:
                float(value)
            except (TypeError, ValueError):
                return ConfigurationError(
                    f"metrics[{name!r}] of step {step - 1}",
                    _described(value),
                    "a number, or an array with one element, for example its mean",
                )
        raise InvariantViolated(f"each metric of step {step - 1} is a number by itself")

    def _name(self, names: tuple[str, ...]) -> None:
        if self._names is not None:
            raise ConfigurationError(
                "metrics", names, f"the same names in the same order at every step: {self._names}"
            )
        if len(names) > METRICS_PER_STEP_MAX:
            raise ConfigurationError(
                "metrics", f"{len(names)} values", f"at most {METRICS_PER_STEP_MAX}"
            )
        self._names = names
        self._name_metrics(names)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"an array {getattr(value, 'dtype', '')}{list(shape)}"
    shown = repr(value)
    return f"{type(value).__name__} {shown[:SHOWN_MAX]}{'…' if len(shown) > SHOWN_MAX else ''}"
