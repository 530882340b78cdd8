"""For all tests."""

from __future__ import annotations

import signal

# A shell without job control lets what it starts in the background ignore SIGINT, and that is
# inherited: commands that a test starts could not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
