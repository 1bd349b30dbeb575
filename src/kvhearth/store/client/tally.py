"""What a client has asked of a store and what came of it, for its metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.client.outcomes import MissReason


class Tally:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcomes: dict[tuple[str, str], int] = {}
        self._bytes: dict[tuple[str, str], int] = {}

    def count(self, operation: str, reasons: Iterable[MissReason | None]) -> None:
        """Some keys or rows were asked for; None is a success."""
        with self._lock:
            for reason in reasons:
                key = (operation, "ok" if reason is None else reason.value)
                self._outcomes[key] = self._outcomes.get(key, 0) + 1

    def moved(self, transport: str, operation: str, nbytes: int) -> None:
        """Bytes of rows have come (``get``) or gone (``put``) by ``tcp``, ``unix`` or ``shared`` memory."""
        with self._lock:
            self._bytes[transport, operation] = self._bytes.get((transport, operation), 0) + nbytes

    @property
    def outcomes(self) -> dict[tuple[str, str], int]:
        """(operation, ``ok`` or a `MissReason` value) → number."""
        with self._lock:
            return dict(self._outcomes)

    @property
    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """(transport, operation) → bytes."""
        with self._lock:
            return dict(self._bytes)

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        yield MetricFamily(m.CLIENT_CALLS, [(key, float(number)) for key, number in self.outcomes.items()])
        yield MetricFamily(m.CLIENT_BYTES, [(key, float(number)) for key, number in self.moved_bytes.items()])
