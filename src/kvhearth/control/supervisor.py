"""Keeps a set of child processes running: start in stages, restart with backoff, stop in order. Knows nothing of what
the children do; one thread owns them all, and everyone else reads snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from kvhearth.control.backoff import Backoff, RestartPolicy
from kvhearth.control.child import ChildSpec, Process, describe_exit
from kvhearth.control.logs import BoundedLog
from kvhearth.errors import UserError

_TICK_SECONDS = 0.05
_TRIM_SECONDS = 1.0
_REAP_SECONDS = 5.0


class State(Enum):
    """Where a child is in its life."""

    WAITING = "waiting"
    """Not running: its stage has not come yet, or a restart is due later."""
    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"
    """Died at once too often; retried slowly while the rest goes on."""
    STOPPED = "stopped"


class ChildView(NamedTuple):
    """A child at one moment. ``pid`` is None while no process runs."""

    name: str
    state: State
    pid: int | None
    restarts: int
    log: Path


class Event(NamedTuple):
    """Something that whoever runs the stack wants to read: ``message`` is one line, ``log_lines`` the child's last."""

    child: str
    message: str
    log_lines: Sequence[str] = ()


class _Child:
    """The supervisor's own record of a child; touched by its thread only."""

    def __init__(self, spec: ChildSpec, log: BoundedLog, policy: RestartPolicy) -> None:
        self.spec = spec
        self.log = log
        self.backoff = Backoff(policy)
        self.process: Process | None = None
        self.state = State.WAITING
        self.started_at = 0.0
        self.ready_at: float | None = None
        self.answers = False
        self.due_at = 0.0
        self.restarts = 0

    def view(self) -> ChildView:
        pid = self.process.pid if self.process else None
        return ChildView(self.spec.name, self.state, pid, self.restarts, self.log.path)

    def start(self, now: float) -> None:
        self.process = Process(self.spec, self.log)
        self.state, self.started_at, self.ready_at, self.answers = State.STARTING, now, None, False


class Supervisor:
    """Runs children until `stop`.

    Args:
        specs: the children; names are unique.
        log_dir: where ``NAME.log`` of each goes; must exist.
        policy: how restarts are spaced.
        stop_seconds: deadline of an orderly end, a stage; then SIGKILL.
        on_event: told of deaths, restarts and failures, from the supervisor's thread; must not block for long.
    """

    def __init__(
        self,
        specs: Iterable[ChildSpec],
        log_dir: Path,
        *,
        policy: RestartPolicy = RestartPolicy(),
        stop_seconds: float = 5.0,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._children = [_Child(spec, BoundedLog(log_dir / f"{spec.name}.log"), policy) for spec in specs]
        self._stop_seconds = stop_seconds
        self._on_event = on_event
        self._views = {child.spec.name: child.view() for child in self._children}
        self._failure: Exception | None = None
        self._settled = threading.Event()
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhearth-supervisor", daemon=True)

    def start(self) -> None:
        """Begin to start the children; returns at once."""
        self._thread.start()

    def views(self) -> list[ChildView]:
        """All children as of now, in the order given."""
        return list(self._views.values())

    def child(self, name: str) -> ChildView:
        """One child as of now. Raises KeyError for a name that no child has."""
        return self._views[name]

    def wait_settled(self, seconds: float) -> bool:
        """Wait until every child is ready or the start has failed; False when neither came in time.

        Raises:
            UserError: a child could not be started, with its own words; everything has been stopped again.
        """
        if not self._settled.wait(seconds):
            return False
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return True

    def wait_ended(self, seconds: float) -> bool:
        """Wait for the end of supervision itself; False when it still goes on after so many seconds.

        Raises:
            Exception: it ended by a bug of its own; the children have been ended.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def request_stop(self, *, hurry: bool = False) -> None:
        """Begin to end all children; returns at once."""
        if hurry:
            self._hurry.set()
        self._stop.set()

    def stop(self, *, hurry: bool = False) -> None:
        """End all children, the highest stage first, and wait until they are gone; ``hurry`` kills at once."""
        self.request_stop(hurry=hurry)
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._start_in_stages():
                self._settled.set()
                self._watch()
        except Exception as bug:
            self._failure = bug
        finally:
            self._end_all()
            self._settled.set()

    def _stages(self) -> list[int]:
        return sorted({child.spec.stage for child in self._children})

    def _start_in_stages(self) -> bool:
        """Start everything for the first time; False when stopped or failed on the way."""
        for stage in self._stages():
            members = [child for child in self._children if child.spec.stage == stage]
            for child in members:
                try:
                    child.start(time.monotonic())
                except OSError as error:
                    self._failure = UserError(f"could not be started: {error}", where=child.spec.name)
                    return False
            self._publish()
            while any(child.state is not State.READY for child in members):
                if self._stop.wait(_TICK_SECONDS):
                    return False
                self._failure = next(
                    (failure for child in self._children if (failure := self._start_failure(child))), None
                )
                if self._failure is not None:
                    return False
                self._publish()
        return True

    def _start_failure(self, child: _Child) -> UserError | None:
        """Move a child on towards readiness; the reason when it will not get there."""
        if child.process is None:
            return None
        code = child.process.poll()
        if code is not None:
            said = child.log.last_error()
            how = f"{describe_exit(code)} before the stack was ready"
            return UserError(f"{how}: {said}" if said else how, where=child.spec.name)
        self._check_ready(child)
        if child.state is State.STARTING and time.monotonic() - child.started_at > child.spec.start_seconds:
            said = child.log.last_error()
            how = f"not ready within {child.spec.start_seconds:g} s ({child.spec.ready_url} does not answer 200)"
            return UserError(f"{how}; it last said: {said}" if said else how, where=child.spec.name)
        return None

    def _check_ready(self, child: _Child) -> None:
        if child.state is State.STARTING and child.process is not None:
            status = child.process.probe()
            child.answers = status is not None
            if status == HTTPStatus.OK:
                child.state, child.ready_at = State.READY, time.monotonic()

    def _watch(self) -> None:
        """Restart what dies until asked to stop."""
        trim_at = 0.0
        while not self._stop.wait(_TICK_SECONDS):
            now = time.monotonic()
            for child in self._children:
                self._tend(child, now)
            if now >= trim_at:
                trim_at = now + _TRIM_SECONDS
                for child in self._children:
                    child.log.trim()
            self._publish()

    def _tend(self, child: _Child, now: float) -> None:
        if child.process is None:
            if now >= child.due_at:
                self._restart(child, now)
            return
        code = child.process.poll()
        if code is not None:
            self._bury(child, describe_exit(code), now)
            return
        was_starting = child.state is State.STARTING
        self._check_ready(child)
        if was_starting and child.state is State.READY:
            self._on_event(Event(child.spec.name, f"ready again {now - child.started_at:.1f} s after its restart"))
        elif was_starting and not child.answers and now - child.started_at > child.spec.start_seconds:
            # One that answers, if only "not now", waits for others: a router whose engines are all away.
            child.process.kill()
            _await_exit([child.process], now + _REAP_SECONDS)
            self._bury(child, f"was not ready within {child.spec.start_seconds:g} s", now)

    def _restart(self, child: _Child, now: float) -> None:
        child.restarts += 1
        try:
            child.start(now)
        except OSError as error:  # no memory or process slots at this moment: as good as a death
            self._bury(child, f"could not be started: {error}", now)

    def _bury(self, child: _Child, how: str, now: float) -> None:
        """Note a death, and when the next life begins."""
        delay = child.backoff.died(now - child.ready_at if child.ready_at is not None else 0.0)
        child.process, child.due_at = None, now + delay
        child.state = State.FAILING if child.backoff.given_up else State.WAITING
        if child.state is State.FAILING:
            message = f"{how}, again at once; going on without it, next try in {delay:g} s (log: {child.log.path})"
            self._on_event(Event(child.spec.name, message, child.log.tail()))
        else:
            self._on_event(Event(child.spec.name, f"{how}; restarting in {delay:g} s"))

    def _end_all(self) -> None:
        for stage in reversed(self._stages()):
            running = [child.process for child in self._children if child.spec.stage == stage and child.process]
            for process in running:
                process.terminate()
            if _await_exit(running, time.monotonic() + self._stop_seconds, cut_short_by=self._hurry):
                continue
            for process in running:
                process.kill()
            _await_exit(running, time.monotonic() + _REAP_SECONDS)
        for child in self._children:
            child.process, child.state = None, State.STOPPED
        self._publish()

    def _publish(self) -> None:
        self._views = {child.spec.name: child.view() for child in self._children}


def _await_exit(processes: Sequence[Process], deadline: float, cut_short_by: threading.Event | None = None) -> bool:
    """Wait for processes to end; False when one has not by the deadline, or the wait was cut short."""
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline or (cut_short_by is not None and cut_short_by.is_set()):
            return False
        time.sleep(_TICK_SECONDS / 5)
    return True
