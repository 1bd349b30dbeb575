"""Real traffic with the store behind the modelled one: asks, gets and puts on threads of its own.

A chunk's real value is scaled down and follows from its key, so a wrong value is seen for what it is. The store is a
cache: whatever fails or comes late is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.client.outcomes import MissReason
from kvhearth.store.open import open_store
from kvhearth.store.protocol.header import Header
from kvhearth.store.ring.client import StoreRing

MAX_QUEUED_CALLS = 4096
MAX_QUEUED_PUTS = 8192
_CHUNKS_A_CALL = 256

_log = logging.getLogger(__name__)


def store_key(namespace: str, chunk: int) -> bytes:
    """Where a chunk is in the store, in the form that engines' own keys have: namespace, hash, and group 0."""
    return b"%s:%s\0\0\0\0" % (namespace.encode(), chunk.to_bytes(8, "big"))


class Reply:
    """What the store will have answered: ``count`` leading keys, at emulated time ``at_ns``; None = not yet."""

    __slots__ = ("at_ns", "count")

    def __init__(self) -> None:
        self.count = 0
        self.at_ns: int | None = None


class StoreIo:
    """One engine's traffic with the store. Methods return at once; ``notify`` is called from a thread on each reply.

    Args:
        address: the store or ring, as `open_store` takes it.
        password: for AUTH; None for none.
        namespace: begins every key; see `store_key`.
        payload_bytes: length of a chunk's value.
        deadline_seconds: for each call, of the wall clock.
        now_ns: the emulated clock, read from the threads.
    """

    def __init__(
        self,
        address: str,
        password: str | None,
        *,
        namespace: str,
        payload_bytes: int,
        deadline_seconds: float,
        now_ns: Callable[[], int],
    ) -> None:
        self.notify: Callable[[], None] = lambda: None
        self.up = True
        self._namespace = namespace
        self._payload_bytes = payload_bytes
        self._now_ns = now_ns
        self._counts = {"get_bytes": 0, "put_bytes": 0, "wrong_bytes": 0}
        self._buffers = [bytearray(payload_bytes) for _ in range(min(_CHUNKS_A_CALL, 1 + (8 << 20) // payload_bytes))]
        self._puts_dropped = 0
        self._puts_waiting = 0
        self._lock = threading.Lock()
        # One client, connection and thread each, so that a long put delays no lookup.
        self._clients = [
            open_store(address, timeout_seconds=deadline_seconds, password=password, max_connections=1)
            for _ in range(3)
        ]
        names = ("match", "get", "put")
        self._workers = [_Worker(f"kvhearth-emulator-store-{name}") for name in names]

    def match(self, keys: Sequence[int]) -> Reply:
        """Ask how many leading ``keys`` the store has."""
        return self._hand_over(0, lambda client: client.match([self._key(key) for key in keys]))

    def fetch(self, keys: Sequence[int]) -> Reply:
        """Get values and check them; the reply counts the leading keys whose value came and was right."""
        return self._hand_over(1, lambda client: self._get(client, keys))

    def put(self, keys: Sequence[int]) -> Reply:
        """Put values; the reply counts the leading keys that were stored. What the queue has no room for is dropped
        from the end, as a chunk without its predecessors is of no use."""
        with self._lock:
            fit = min(len(keys), MAX_QUEUED_PUTS - self._puts_waiting)
            self._puts_waiting += fit
            self._puts_dropped += len(keys) - fit
        kept = keys[:fit]
        return self._hand_over(2, lambda client: self._put(client, kept))

    def counts(self) -> dict[str, int]:
        """``get_bytes``, ``put_bytes``, ``wrong_bytes`` of values; ``errors`` of calls; ``puts_dropped`` chunks."""
        fine = ("ok", MissReason.ABSENT.value)
        outcomes = [item for client in self._clients for item in client.counts.items()]
        errors = sum(number for (_, outcome), number in outcomes if outcome not in fine)
        return {**self._counts, "errors": errors, "puts_dropped": self._puts_dropped}

    def close(self) -> None:
        """End the threads; waits for calls under way, at most their deadline."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()
        for client in self._clients:
            client.close()

    # ---- on the threads

    def _hand_over(self, index: int, call: Callable[[StoreClient | StoreRing], int]) -> Reply:
        reply, client = Reply(), self._clients[index]

        def run() -> None:
            before = _failures(client)
            try:
                reply.count = call(client)
            except Exception:
                _log.exception("a call of the store failed; it counts as a miss")
            finally:
                self._note(up=_failures(client) == before)
                reply.at_ns = self._now_ns()
                self.notify()

        if not self._workers[index].take(run):
            reply.at_ns = self._now_ns()
        return reply

    def _get(self, client: StoreClient | StoreRing, keys: Sequence[int]) -> int:
        size = len(self._buffers)
        for start in range(0, len(keys), size):
            part = [self._key(key) for key in keys[start : start + size]]
            results = client.get_many_into(part, self._buffers[: len(part)])
            for index, (key, result, buffer) in enumerate(zip(part, results, self._buffers, strict=False)):
                self._counts["get_bytes"] += result.nbytes
                right = result.hit and buffer == self._payload(key) and result.nbytes == self._payload_bytes
                if result.hit and not right:
                    self._counts["wrong_bytes"] += result.nbytes
                    _log.error("the store gave wrong bytes for %r", key)
                if not right:
                    return start + index
        return len(keys)

    def _put(self, client: StoreClient | StoreRing, keys: Sequence[int]) -> int:
        stored = 0
        try:
            for start in range(0, len(keys), len(self._buffers)):
                part = [self._key(key) for key in keys[start : start + len(self._buffers)]]
                header = Header(payload_bytes=self._payload_bytes)
                results = client.put_many([Put(key, header, self._payload(key)) for key in part])
                done = next((i for i, result in enumerate(results) if not result.stored), len(part))
                self._counts["put_bytes"] += done * self._payload_bytes
                stored += done
                if done < len(part):
                    break
        finally:
            with self._lock:
                self._puts_waiting -= len(keys)
        return stored

    def _key(self, chunk_hash: int) -> bytes:
        return store_key(self._namespace, chunk_hash)

    def _payload(self, key: bytes) -> bytes:
        """What stands for a chunk's KV: the key's 16-byte hash, over and over."""
        return (xxhash.xxh3_128_digest(key) * (self._payload_bytes // 16 + 1))[: self._payload_bytes]

    def _note(self, *, up: bool) -> None:
        if up != self.up:
            self.up = up
            _log.warning("the store %s", "answers again" if up else "does not answer: every lookup is a miss")


class _Worker:
    """A thread with a bounded queue."""

    def __init__(self, name: str) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._ready = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def take(self, task: Callable[[], None]) -> bool:
        """Queue a task; False when there is no room."""
        with self._ready:
            if self._stopped or len(self._tasks) >= MAX_QUEUED_CALLS:
                return False
            self._tasks.append(task)
            self._ready.notify()
            return True

    def stop(self) -> None:
        """Drop what is queued and end after the task under way."""
        with self._ready:
            self._stopped = True
            self._tasks.clear()
            self._ready.notify()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._tasks:
                    if self._stopped:
                        return
                    self._ready.wait()
                task = self._tasks.popleft()
            task()


def _failures(client: StoreClient | StoreRing) -> int:
    return sum(number for (_, outcome), number in client.counts.items() if outcome not in ("ok", "absent"))
