"""Run a command that the kernel kills when its parent ends.

Usage: `python tether.py <parent pid> command…`.

Run as a file with `-I -S`, so that it costs a bare interpreter and nothing of this project. The
death signal survives `exec`, which is why this small process can set it for any command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_FOUND = 127
NOT_EXECUTABLE = 126


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)
    # Python ignores these for itself and would hand that on to the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"everstep-agent: {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)


if __name__ == "__main__":
    main()
