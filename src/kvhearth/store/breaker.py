"""When to stop asking a store that does not answer. Knows nothing of sockets; time comes in as an argument."""

from __future__ import annotations

import threading

_THRESHOLD = 3
_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 2.0


class Breaker:
    """Opens after three failures in a row; then one call an interval is let through, until one succeeds. The interval
    doubles from 0.1 s to 2 s. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are being turned away."""
        return self._failures >= _THRESHOLD

    def allows(self, now: float) -> bool:
        """Whether a call may go out at ``now`` (monotonic seconds). A True on an open breaker is the interval's one."""
        with self._lock:
            if not self.is_open:
                return True
            if now < self._next_try:
                return False
            self._next_try = now + self._backoff_seconds()
            return True

    def succeeded(self) -> bool:
        """The store answered. True when this closed an open breaker."""
        if not self._failures:
            return False
        with self._lock:
            was_open = self.is_open
            self._failures = 0
            return was_open

    def failed(self, now: float, *, was_trial: bool) -> bool:
        """A call failed at ``now``; ``was_trial``: it went out while the breaker was open. True when this opened it."""
        with self._lock:
            if self.is_open and not was_trial:
                return False  # one outage seen by many calls at once counts once
            self._failures = min(self._failures + 1, _THRESHOLD + 16)
            self._next_try = now + self._backoff_seconds()
            return self._failures == _THRESHOLD

    def _backoff_seconds(self) -> float:
        doublings = max(0, self._failures - _THRESHOLD)
        return float(min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2**doublings))
