"""Run a function of a test in a fresh process with several CPU devices.

jax settles the number of devices once per process, and other tests want other numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable


def in_fresh_process(
    function: Callable[..., None], *arguments: object, devices: int = 8, timeout_s: float = 240
) -> None:
    """Call a function of a module in a process with this many CPU devices; it fails as that does.

    Args:
        function: defined at the top of a test module.
        arguments: written as `repr`.
        devices: how many.
        timeout_s: after which the process is killed and the test fails.
    """
    module = sys.modules[function.__module__].__file__
    call = f"{function.__name__}({', '.join(map(repr, arguments))})"
    program = (
        "import importlib.util as u, sys, warnings\n"
        "warnings.simplefilter('error')\n"
        f"spec = u.spec_from_file_location('fresh', {module!r})\n"
        "module = u.module_from_spec(spec)\n"
        "sys.modules['fresh'] = module\n"
        "spec.loader.exec_module(module)\n"
        f"module.{call}\n"
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{call}\n{done.stdout}\n{done.stderr}"
