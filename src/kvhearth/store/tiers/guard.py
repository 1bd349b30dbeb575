"""What keeps a sick device from making the store sick: threads of its own with deadlines, a breaker, and one log line
when it goes and one when it is back. Knows nothing of files or objects.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

from kvhearth.store.breaker import Breaker

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Reason(Enum):
    """Why a read missed, or a write was not done. Besides these: the flaws of `files.Flaw`."""

    ABSENT = "absent"
    """No such value is known."""
    VANISHED = "vanished"
    """It was known, and is gone from the device."""
    RESIZED = "resized"
    """It has another length than the caller made room for."""
    TIMEOUT = "timeout"
    """The device did not answer in time."""
    BUSY = "busy"
    """Every thread waits for the device, or the same key is being written."""
    DOWN = "down"
    """Recent calls failed, so this one was not tried."""
    IO = "io"
    """The device answered with an error."""
    DENIED = "denied"
    """Not permitted: wrong rights or credentials, or a read-only file system."""
    MISSING = "missing"
    """The folder, volume or bucket is not there."""
    LOCKED = "locked"
    """Another server uses the folder."""
    NO_SPACE = "no_space"
    """The file system is full but for the reserve, also after evicting."""
    TOO_LARGE = "too_large"
    """The value is larger than the tier."""
    NO_ROOM = "no_room"
    """Nothing could be evicted to make room."""


class TierError(Exception):
    """Ends an operation inside a tier; callers of the tier never see it.

    Args:
        reason: the label it is counted under.
        sick: whether it speaks against the device (and so counts for the breaker), not only against this one value.
    """

    def __init__(self, reason: Reason, *, sick: bool = True) -> None:
        self.reason = reason
        self.sick = sick
        super().__init__(reason.value)


_BY_ERRNO = {
    errno.EACCES: Reason.DENIED,
    errno.EPERM: Reason.DENIED,
    errno.EROFS: Reason.DENIED,
    errno.ENOSPC: Reason.NO_SPACE,
    errno.EDQUOT: Reason.NO_SPACE,
    errno.ENOENT: Reason.MISSING,
    errno.ENOTDIR: Reason.MISSING,
    errno.ENODEV: Reason.MISSING,
    errno.ESTALE: Reason.MISSING,
    errno.ENOTCONN: Reason.MISSING,
}


def reason_of(error: OSError) -> Reason:
    """The reason that an error of the operating system is counted under."""
    return _BY_ERRNO.get(error.errno or 0, Reason.IO)


class Call(Generic[T]):
    """One piece of work on its way through `Workers`."""

    __slots__ = ("_done", "_error", "_lock", "_result", "_wanted", "_work")

    def __init__(self, work: Callable[[Call[T]], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._wanted = True
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it, or may."""
        return self._wanted

    @contextlib.contextmanager
    def wanted(self) -> Iterator[None]:
        """Holds the caller while the body runs (short, no I/O): what belongs to the caller may be touched only here.

        Raises:
            TierError: the caller has given up.
        """
        with self._lock:
            if not self._wanted:
                raise TierError(Reason.TIMEOUT)
            yield

    def result(self, deadline: float) -> T:
        """What the work returned.

        Raises:
            TierError: not done by ``deadline`` (monotonic seconds), or from the work.
            Exception: any other from the work.
        """
        if not self._done.wait(max(0.0, deadline - time.monotonic())):
            with self._lock:
                self._wanted = self._done.is_set()
            if not self._wanted:
                raise TierError(Reason.TIMEOUT)
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def run(self) -> None:
        """Do the work, unless nobody wants it any more. For the thread that took the call."""
        try:
            with self.wanted():
                pass
            self._result = self._work(self)
        except BaseException as error:  # whoever waits gets it
            self._error = error
        with self._lock:
            self._done.set()


class Workers:
    """At most ``threads`` daemon threads, started as needed, on which a device may hang without hanging a caller.

    A thread that hangs is lost until the device answers; when all do, calls end as ``busy`` and none is added.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._running = 0
        self._idle = 0
        self._queue: deque[Call[Any]] = deque()
        self._wake = threading.Condition()
        self._closed = False

    def run(self, work: Callable[[Call[T]], T], deadline: float) -> T:
        """Do ``work`` on one of the threads and wait for it. It is given its own `Call`.

        Raises:
            TierError: ``timeout`` or ``busy``, or from the work.
            Exception: any other from the work.
        """
        return self.submit(work).result(deadline)

    def submit(self, work: Callable[[Call[T]], T]) -> Call[T]:
        """Do ``work`` on one of the threads; `Call.result` waits for it.

        Raises:
            TierError: ``busy``, too many wait already, or the workers are closed.
        """
        call = Call(work)
        with self._wake:
            if len(self._queue) >= 2 * self._threads:
                self._queue = deque(waiting for waiting in self._queue if waiting.is_wanted)
            if self._closed or len(self._queue) >= 2 * self._threads:
                raise TierError(Reason.BUSY, sick=False)
            self._queue.append(call)
            if len(self._queue) > self._idle and self._running < self._threads and not self._start_one():
                self._queue.pop()
                raise TierError(Reason.BUSY, sick=False)
            self._wake.notify()
        return call

    def close(self) -> None:
        """Let the threads end as they become free; what still waits is done first."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def _start_one(self) -> bool:
        """One more thread, if there is one to be had; whether there is any now."""
        try:
            threading.Thread(target=self._loop, name=f"kvhearth-{self._name}", daemon=True).start()
        except RuntimeError:
            return self._running > 0
        self._running += 1
        return True

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._wake.wait()
                self._idle -= 1
                if not self._queue:
                    self._running -= 1
                    return
                call = self._queue.popleft()
            call.run()
            del call  # or an idle thread would keep the last value's memory


class Health:
    """Whether a device is asked at all. Wrap each operation in `watch`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._breaker = Breaker()

    @property
    def is_down(self) -> bool:
        """Whether operations are being turned away."""
        return self._breaker.is_open

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Count how the body ends for the breaker; an OSError leaves as a `TierError`.

        Raises:
            TierError: ``down``, without running the body; or from the body.
        """
        was_trial = self._breaker.is_open
        if not self._breaker.allows(time.monotonic()):
            raise TierError(Reason.DOWN, sick=False)
        try:
            yield
        except TierError as error:
            if error.sick:
                self._failed(error.reason, was_trial=was_trial)
            raise
        except OSError as error:
            self._failed(reason_of(error), was_trial=was_trial)
            raise TierError(reason_of(error)) from error
        self._succeeded()

    def trip(self, reason: Reason) -> None:
        """Turn operations away from now on, until one succeeds: it is known that none can."""
        while not self._breaker.is_open:
            self._failed(reason, was_trial=False)

    def heal(self) -> None:
        """Let operations through: it is known that they can work."""
        self._succeeded()

    def _failed(self, reason: Reason, *, was_trial: bool) -> None:
        if self._breaker.failed(time.monotonic(), was_trial=was_trial):
            _log.warning("%s is down (%s): the store goes on without it and keeps trying", self._what, reason.value)

    def _succeeded(self) -> None:
        if self._breaker.succeeded():
            _log.warning("%s is back", self._what)
