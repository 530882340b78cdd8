"""Random stories for a simulated job: what befalls it, drawn from one seed."""

from __future__ import annotations

from random import Random
from typing import Any

from msgspec.structs import replace

from core_jobs import make_spec
from everstep.controller.api.ids import HostId, SliceId
from everstep.controller.api.spec import JobSpec
from everstep.controller.core.ledger import Ledger, Stage
from everstep.controller.core.model import Capacity, NoticeClass
from simulated_job import SimulatedJob, Timing

FAILURES = frozenset({"kill_worker", "raise"})
"""Faults that may be charged to the failure budget."""
DISRUPTIONS = (
    "kill_slice",
    "kill_agent",
    "kill_coordinator",
    "take",
    "take",
    "give",
    "give",
    "give",
    "notify",
    "notify",
    "withdraw",
    "freeze",
    "thaw",
    "terminate",
    "cut",
    "mend",
    "respec",
    "suspend",
    "resume",
)
LIVE_AGAIN_S = 150.0
"""After the faults stop: outage pause 20 s, join 25 s, backoff 16 s, growth, each at most twice."""


class Story:
    """One job and its fate. `events` is what a failing test prints.

    Args:
        seed: of everything that is drawn.
        may_fail: whether faults are drawn that count as failures.
    """

    def __init__(self, *, seed: int, may_fail: bool) -> None:
        self.seed, self.may_fail = seed, may_fail
        self.random = Random(seed)
        self.events: list[str] = []
        self.incarnations: list[int] = []
        self.job = SimulatedJob(self._draw_spec(), timing=self._draw_timing())
        self.desired = self.job.spec.slices.desired

    def _draw_spec(self) -> JobSpec:
        random = self.random
        desired = random.randint(1, 4)
        slices: dict[str, Any] = {"min": random.randint(1, desired)}
        if random.random() < 0.3:
            counts = {n for n in (1, 2, 4) if slices["min"] <= n <= desired} | {desired}
            slices["allowedCounts"] = sorted(counts)
        if random.random() < 0.3:
            slices["max"] = desired + 1
        policies = ["ShrinkImmediately", "WaitThenShrink", "WaitForReplacement"]
        return make_spec(
            desired=desired,
            hosts=random.randint(1, 2),
            on_loss=random.choice(policies),
            wait_s=random.choice([0.0, 1.0, 5.0]),
            slices=slices,
            restart={"maxRestarts": 1000, "maxDisruptionsPerHour": 1000},
        )

    def _draw_timing(self) -> Timing:
        random = self.random
        return Timing(
            start_s=random.choice([0.1, 0.4, 2.0]),
            join_s=random.choice([0.0, 0.1, 0.5]),
            restore_s=random.choice([0.0, 0.2, 1.0]),
            step_s=random.choice([0.1, 0.3]),
            hold_s=random.choice([0.1, 0.5, 3.0]),
        )

    def play(self, *, count: int = 25) -> None:
        """Let faults happen at random moments, with a controller that is itself not well."""
        for _ in range(count):
            self._live(self.random.choice([0.1, 0.3, 1.0, 2.5]))
            self._befall()

    def _live(self, seconds: float) -> None:
        job, random = self.job, self.random
        until_s = job.now_s + seconds
        while job.now_s < until_s:
            job.advance(random.choice([0.1, 0.1, 0.2]))
            luck = random.random()
            if luck < 0.08:
                # The controller is killed between any two lines, and starts again later.
                job.run_pass(crash_after=random.randint(0, 4))
            elif luck < 0.12:
                job.run_pass(conflict=True)
            elif luck < 0.9:
                job.run_pass()
            self._watch()

    def _watch(self) -> None:
        ledger: Ledger = self.job.ledger
        if not self.incarnations or ledger.incarnation != self.incarnations[-1]:
            self.incarnations.append(ledger.incarnation)

    def _befall(self) -> None:
        job, random = self.job, self.random
        kinds = [*DISRUPTIONS, *(sorted(FAILURES) * 2 if self.may_fail else ())]
        kind = random.choice(kinds)
        id_ = SliceId(random.randrange(job.spec.slices.count_max))
        host = HostId(id_, random.randrange(job.spec.slices.hosts_per_slice))
        self.events.append(f"{job.now_s:.1f} {kind} {host}")
        present = host in job.agents and job.agents[host].is_alive
        match kind:
            case "kill_worker" if present:
                job.kill_worker(host)
            case "raise" if present:
                job.raise_in_worker(host)
            case "kill_slice":
                job.kill_slice(id_)
            case "kill_agent":
                job.kill_agent(host)
            case "kill_coordinator":
                job.kill_coordinator(aborts=random.random() < 0.5)
            case "take":
                job.take(id_)
            case "give":
                job.give(id_)
            case "notify":
                notice_class = random.choice(list(NoticeClass))
                job.notify(id_, random.choice([0.2, 1.0, 5.0, 20.0]), notice_class)
            case "withdraw":
                job.withdraw(id_)
            case "freeze":
                job.freeze(id_)
            case "thaw":
                job.thaw(id_)
            case "terminate" if present:
                job.terminate(host, random.choice([1.0, 5.0]))
            case "cut":
                job.cut_reports = True
            case "mend":
                job.cut_reports = False
            case "respec":
                low, high = job.spec.slices.count_min, job.spec.slices.count_max
                allowed = [n for n in range(low, high + 1) if job.spec.slices.allows(n)]
                slices = replace(job.spec.slices, desired=random.choice(allowed), max=high)
                job.respec(replace(job.spec, slices=slices))
            case "suspend":
                job.respec(replace(job.spec, suspend=True))
            case "resume":
                job.respec(replace(job.spec, suspend=False))
            case _:
                pass

    def heal(self) -> bool:
        """Stop all faults, and say whether the job trains again on all it wants in time."""
        job = self.job
        self.events.append(f"{job.now_s:.1f} heal")
        job.cut_reports = False
        for id_ in list(job.capacity):
            job.thaw(id_)
            job.give(id_)
        slices = replace(job.spec.slices, desired=self.desired)
        job.respec(replace(job.spec, slices=slices, suspend=False))
        until_s = job.now_s + LIVE_AGAIN_S
        while job.now_s < until_s:
            job.advance(0.1)
            job.run_pass()
            self._watch()
            ledger = job.ledger
            is_calm = ledger.turnover is None and ledger.incident is None
            if is_calm and len(job.training()) == self.desired:
                return True
        return False

    def describe(self) -> str:
        """Return what to look at when a story ends badly."""
        job = self.job
        gone = [id_ for id_, state in job.capacity.items() if state is Capacity.GONE]
        return (
            f"seed {self.seed}\n" + "\n".join(self.events) + f"\nspec {job.spec.slices} "
            f"{job.spec.elasticity.on_loss}\nstage {job.ledger.stage} {job.status.message}\n"
            f"ledger {job.ledger}\ngone {gone} training {sorted(job.training())}\n"
            f"directive {job.directive}\nagents {list(job.agents.values())}"
        )


def is_over(job: SimulatedJob) -> bool:
    return job.ledger.stage is Stage.FINISHED
