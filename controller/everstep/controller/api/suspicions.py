"""What is legal but probably not meant."""

from __future__ import annotations

from everstep.controller.api.errors import Problem
from everstep.controller.api.problems import Problems
from everstep.controller.api.spec import JobSpec


def suspicions(spec: JobSpec) -> tuple[Problem, ...]:
    """Return what is legal but probably not meant; shown as `ConfigurationSuspect`."""
    found = Problems()
    grace, budget = (
        spec.template.spec.termination_grace_period_seconds,
        spec.checkpoint.emergency.budget_seconds,
    )
    if grace < spec.checkpoint.emergency.safety_margin_seconds:
        found.add(
            "spec.template.spec.terminationGracePeriodSeconds",
            grace,
            "at least spec.checkpoint.emergency.safetyMarginSeconds "
            f"({spec.checkpoint.emergency.safety_margin_seconds:g}); a whole budget is {budget:g}",
        )
    if spec.runtime.timeouts.start_seconds < spec.runtime.timeouts.progress_seconds:
        found.add(
            "spec.runtime.timeouts.startSeconds",
            spec.runtime.timeouts.start_seconds,
            "at least progressSeconds: a first step compiles, later ones do not",
        )
    return tuple(found.items)
