"""What Everstep itself keeps resident on a host, without the state.

Proportional set size (PSS): pages that the zygote and its worker share count once. The zygote is
mostly jax and the user's own imports, which a training has without Everstep too; it is measured
beside a plain interpreter that has imported the same.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

from benchmarks.figures import Arguments, Figure, compared
from benchmarks.slices import running_job

IMPORTS = "import jax, numpy, everstep.runtime.examples.tiny as t, sys; print(1, flush=True); "


def run(arguments: Arguments) -> list[Figure]:
    del arguments
    with running_job({"REDUCTION": "fast", "STEP_S": "0.02"}) as job:
        agent = _pss(job.agent(1))
        zygote, worker = job.program(1)
        figures = [
            Figure(name="agent", value=agent, unit="bytes"),
            compared(
                "zygote, shared pages counted in part",
                _pss(zygote),
                "bytes",
                against="the same imports alone",
                against_value=_imports(),
            ),
            Figure(
                name="worker, with its backend and a tiny state", value=_pss(worker), unit="bytes"
            ),
        ]
        job.wait_spares(job.slice_count)
        spare = job.spare(1)
        if spare is not None:
            figures.append(
                Figure(name="spare worker, warm", value=_pss(spare), unit="bytes"),
            )
        lead = job.lead()
        if lead is not None:
            held = sum(_pss(process) for process in job.coordinators())
            figures.append(
                Figure(name="coordinator processes, all hosts", value=held, unit="bytes")
            )
    return figures


def _pss(process: psutil.Process) -> float:
    return float(process.memory_full_info().pss)


def _imports() -> float:
    """PSS of an interpreter that has imported what the zygote has."""
    program = IMPORTS + "sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        found = _pss(psutil.Process(process.pid))
        process.stdin.close()
        process.wait(timeout=30)
    return found
