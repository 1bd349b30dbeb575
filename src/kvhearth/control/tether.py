"""Become another program that dies with the supervisor: ``python -I -S tether.py PID alone|guarded PROGRAM ARGS…``.

A wrapper rather than ``preexec_fn``, because the supervisor has threads and Python code between fork and exec may then
deadlock. The request (``PR_SET_PDEATHSIG``, prctl(2)) survives exec, and the process id stays the same. The kernel
sends the signal when the *thread* that forked ends, so one thread that lives as long as the children must start them.
It is SIGKILL, since a signal that is sent once must not be one that a stuck child can ignore; an orderly end is SIGTERM
from the supervisor. Run as a file, isolated, so that it starts in milliseconds and imports nothing of ours.

The request does not pass on to what the program starts itself (vLLM's engine core would live on, with all its memory).
So ``guarded`` leaves a second process in the program's group, tied to the program in the same way, which then kills
the group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ALONE, GUARDED = "alone", "guarded"
_PR_SET_PDEATHSIG = 1
_NEWS = signal.SIGUSR1


def main() -> None:
    """Set the death signal, check that the supervisor had not gone before, and turn into the program."""
    supervisor, how, program = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    _die_with_parent(supervisor, signal.SIGKILL)
    if how == GUARDED:
        _leave_guard()
    try:
        os.execvp(program[0], program)  # noqa: S606 - a list of arguments from the supervisor, no shell
    except OSError as error:
        sys.exit(f"kvhearth: error: cannot run {program[0]}: {error.strerror}")


def _die_with_parent(parent: int, how: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, how) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def _leave_guard() -> None:
    """Fork a process that waits for this one's end, however it comes, and then kills its group."""
    program = os.getpid()
    if os.fork() != 0:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {_NEWS, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        _die_with_parent(program, _NEWS)
        signal.sigwait({_NEWS})
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
