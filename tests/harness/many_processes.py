"""One program in several JAX processes on this machine, joined by JAX's own coordination."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
RANK, COUNT = int(os.environ["RANK"]), int(os.environ["COUNT"])
if COUNT > 1:
    jax.distributed.initialize(os.environ["COORDINATOR"], COUNT, RANK, initialization_timeout=60)
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import everstep.runtime as es
RUN = os.environ["RUN"]

def mesh(*shape, names=("x", "y")):
    return Mesh(np.array(jax.devices()).reshape(shape), names[:len(shape)])

def placed(value, sharding):
    return jax.make_array_from_callback(value.shape, sharding, lambda i: value[i])

def same(array, expected):
    return all(
        np.array_equal(np.asarray(s.data), expected[s.index]) for s in array.addressable_shards
    )
"""


@dataclass
class Processes:
    """Runs programs over one folder. Everything that it started is gone after `close`."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list["subprocess.Popen[str]"])

    def start(self, count: int, program: str, **environment: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        started = [
            subprocess.Popen(
                [sys.executable, "-c", HEAD + textwrap.dedent(program)],
                env={
                    **os.environ,
                    "JAX_PLATFORMS": "cpu",
                    "RANK": str(rank),
                    "COUNT": str(count),
                    "COORDINATOR": f"127.0.0.1:{port}",
                    "RUN": str(self.folder / "run"),
                    **environment,
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]
        self.running += started
        return started

    def run(self, count: int, program: str, **environment: str) -> list[str]:
        """Run to the end; what each process printed. Fails unless all end with 0."""
        started = self.start(count, program, **environment)
        outputs = self.outputs(started)
        codes = [process.returncode for process in started]
        assert codes == [0] * count, "\n---\n".join(outputs)
        return outputs

    def outputs(self, started: list[subprocess.Popen[str]], timeout_s: float = 120.0) -> list[str]:
        by_s = time.monotonic() + timeout_s
        return [p.communicate(timeout=max(1.0, by_s - time.monotonic()))[0] for p in started]

    def close(self) -> None:
        for process in self.running:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()
