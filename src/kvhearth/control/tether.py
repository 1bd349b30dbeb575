"""Become another program that dies with the supervisor: ``python -I -S tether.py SUPERVISOR_PID PROGRAM ARGS…``.

A wrapper rather than ``preexec_fn``, because the supervisor has threads and Python code between fork and exec may then
deadlock. The request (``PR_SET_PDEATHSIG``, prctl(2)) survives exec, and the process id stays the same. The kernel
sends the signal when the *thread* that forked ends, so one thread that lives as long as the children must start them.
It is SIGKILL, since a signal that is sent once must not be one that a stuck child can ignore; an orderly end is SIGTERM
from the supervisor. Run as a file, isolated, so that it starts in milliseconds and imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Set the death signal, check that the supervisor had not gone before, and turn into the program."""
    supervisor, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != supervisor:
        sys.exit(1)
    try:
        os.execvp(program[0], program)  # noqa: S606 - a list of arguments from the supervisor, no shell
    except OSError as error:
        sys.exit(f"kvhearth: error: cannot run {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
