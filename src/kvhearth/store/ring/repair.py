"""Rows put back where they were missing, on a thread of its own: bounded, best effort, never in a caller's way."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.protocol.header import Header

MAX_WAITING_BYTES = 64 * 2**20

_BATCH = 16


class _Repair(NamedTuple):
    client: StoreClient
    put: Put
    nbytes: int


class Repairs:
    """Puts rows; what there is no room for is dropped, as the next get finds it again.

    Args:
        max_waiting_bytes: rows held at once, each a copy of the caller's.
    """

    def __init__(self, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self.counts = {"ok": 0, "failed": 0, "dropped": 0}
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[_Repair] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, client: StoreClient, key: bytes, header: Header, row: memoryview) -> None:
        """Put a copy of ``row`` to ``client``, soon."""
        nbytes = len(row) + len(key) + 512
        with self._changed:
            if self._closed or self._waiting_bytes + nbytes > self._max_waiting_bytes:
                self.counts["dropped"] += 1
                return
            self._waiting_bytes += nbytes
        repair = _Repair(client, Put(key, header, bytes(row)), nbytes)
        with self._changed:
            self._waiting.append(repair)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvhearth-store-repair", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Drop what waits; the put under way ends by its deadline."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while batch := self._next():
            client = batch[0].client
            results = client.put_many([repair.put for repair in batch])
            stored = sum(result.stored for result in results)
            with self._changed:
                self.counts["ok"] += stored
                self.counts["failed"] += len(batch) - stored
                self._waiting_bytes -= sum(repair.nbytes for repair in batch)

    def _next(self) -> list[_Repair]:
        """Some repairs of one node; none when closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return []
            batch = [self._waiting.popleft()]
            while self._waiting and len(batch) < _BATCH and self._waiting[0].client is batch[0].client:
                batch.append(self._waiting.popleft())
            return batch
