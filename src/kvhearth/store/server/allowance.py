"""A bound on bytes that many connections draw from, so that together they cannot hold all of the store's memory."""

from __future__ import annotations

import threading


class Allowance:
    """So many bytes for all. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._lock = threading.Lock()

    @property
    def taken_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._taken_bytes

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` if that many are left; whether they were."""
        with self._lock:
            if self._taken_bytes + nbytes > self.limit_bytes:
                return False
            self._taken_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """End what `take` allowed."""
        with self._lock:
            self._taken_bytes -= nbytes
