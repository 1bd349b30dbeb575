"""One child process: started, asked whether it is ready, ended. When to do so is the supervisor's part."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvhearth.control import tether
from kvhearth.control.logs import BoundedLog

PROBE_SECONDS = 1.0
START_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run and how to see that it serves.

    Args:
        name: unique in its stack; also the name of its log file.
        argv: program and arguments.
        ready_url: an ``http://`` address that answers 200 once the child serves.
        stage: children of a lower stage are ready before those of a higher one start, and end after them.
        env: variables set on top of the supervisor's own.
        start_seconds: deadline from its start to its readiness.
        has_children: it starts processes of its own, which must not outlive it.
    """

    name: str
    argv: tuple[str, ...]
    ready_url: str
    stage: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = START_SECONDS
    has_children: bool = False


class Process:
    """A child process in a session of its own, which dies with the thread that made it (see `tether`)."""

    def __init__(self, spec: ChildSpec, log: BoundedLog) -> None:
        self._spec = spec
        sink = log.open_for_child()
        guarded = tether.GUARDED if spec.has_children else tether.ALONE
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid()), guarded, *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                env={**os.environ, **spec.env},
            )
        finally:
            os.close(sink)

    @property
    def pid(self) -> int:
        """Process id, also the id of its process group."""
        return self._popen.pid

    def poll(self) -> int | None:
        """None while it runs, else its exit code (negative: the signal that ended it).

        What it started itself and left in its group is killed before its own id is given back to the system, while the
        id can belong to no one else.
        """
        if self._popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            self._signal(signal.SIGKILL)
            self._popen.wait()
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask it and what it started to end; one that has children of its own is asked alone and ends them itself, for
        vLLM takes an engine core that ends before its server for a crash."""
        if not self._spec.has_children:
            self._signal(signal.SIGTERM)
        elif self._popen.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it and what it started."""
        self._signal(signal.SIGKILL)

    def probe(self) -> int | None:
        """The status that its ready address answers within `PROBE_SECONDS`; None when it does not answer."""
        address = urlsplit(self._spec.ready_url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PROBE_SECONDS)
        try:
            connection.request("GET", address.path or "/")
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def describe_exit(code: int) -> str:
    """An exit code in words: ``exited with code 2``, ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
