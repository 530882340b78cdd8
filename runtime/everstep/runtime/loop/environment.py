"""What a worker's environment must say, from the assignment alone.

Values that a provider or an earlier attempt left in the environment may describe slices that are
gone; a runtime that believes them waits for ever. So every variable that names a member, a count
or an address is replaced, never read.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.runtime.agent.link import Assignment

MEGASCALE_PORT = 8080

# Removed where the assignment has nothing to say. Kinds of hardware and limits are kept.
IDENTITY_VARIABLES = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PARTITION_INDEX",
    "JAX_PROCESS_ID",
    "JAX_SLICE_INDEX",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_PORT",
    "MEGASCALE_SLICE_ID",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_ADDRESSES_PATH",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
)


def identity_variables(assignment: Assignment, found: Mapping[str, str]) -> dict[str, str | None]:
    """The changes to make: a value to set, or None to remove.

    Args:
        found: the environment as it is. The `MEGASCALE_*` and `TPU_*` variables are set when it
            has any of them, or names a TPU in `JAX_PLATFORMS`; elsewhere nobody reads them.
    """
    changes: dict[str, str | None] = {name: None for name in IDENTITY_VARIABLES if name in found}
    wants_tpu = "tpu" in found.get("JAX_PLATFORMS", "").lower() or any(
        name.startswith(("MEGASCALE_", "TPU_")) for name in changes
    )
    if not wants_tpu:
        return changes
    own = next(m for m in assignment.members if m.slice == assignment.host.slice)
    changes["TPU_WORKER_ID"] = str(assignment.host.host)
    changes["TPU_WORKER_HOSTNAMES"] = ",".join(host.address for host in own.hosts)
    if len(assignment.members) > 1:
        lead = assignment.members[0].hosts[0]
        changes["MEGASCALE_COORDINATOR_ADDRESS"] = f"{lead.address}:{MEGASCALE_PORT}"
        changes["MEGASCALE_NUM_SLICES"] = str(len(assignment.members))
        changes["MEGASCALE_SLICE_ID"] = str(own.rank)
    return changes


def backend_flags(found: str, *, patience_s: float) -> str:
    """`XLA_FLAGS` for the CPU backend: wait for slow members, do not abort.

    A member that is gone is found by the agents, which end the workers; XLA's own time-outs only
    turn a slow compile elsewhere into an abort here. What the user has set stays.

    Args:
        found: the variable as it is.
        patience_s: how long a collective may wait; a backstop.
    """
    seconds = max(1, round(patience_s))
    wanted = {
        "--xla_cpu_collective_timeout_seconds": seconds,
        "--xla_cpu_collective_call_terminate_timeout_seconds": seconds,
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds": min(60, seconds),
    }
    kept = found.split()
    named = {flag.split("=", 1)[0] for flag in kept}
    return " ".join(kept + [f"{k}={v}" for k, v in wanted.items() if k not in named])
