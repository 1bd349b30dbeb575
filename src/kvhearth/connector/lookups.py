"""Which chunks the store has: asked a step at a time on a thread of its own, answered a step or more later.

The scheduler's thread never waits here. An answer that is not there at its deadline is a miss; the deadline is kept in
the thread, since the scheduler looks only once a step and a step may be longer than the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvhearth.connector.threads import start_thread

_MAX_QUEUED_KEYS = 1 << 16
_RECHECK_SECONDS = 0.005
_LONGEST_RECHECK_SECONDS = 0.05
_CHUNKS_A_RECHECK = 64

_log = logging.getLogger(__name__)


class AsksStore(Protocol):
    """The part of `StoreClient` that lookups need."""

    def exists_many(self, keys: Sequence[bytes], *, timeout_seconds: float | None = None) -> list[bool]: ...
    @property
    def counts(self) -> dict[tuple[str, str], int]: ...


class Promise(NamedTuple):
    """Another engine has promised chunks: the keys of the first ``tokens`` tokens are awaited ``until`` then."""

    tokens: int
    until: float


class _Batch:
    """What one request asked in one step."""

    __slots__ = (
        "deadline",
        "found",
        "keys",
        "pause",
        "promise",
        "promised",
        "recheck_at",
        "req_id",
        "serial",
        "store_keys",
    )

    def __init__(self, req_id: str, serial: int, promise: Promise | None) -> None:
        self.req_id = req_id
        self.serial = serial
        self.promise = promise
        self.promised: list[int] = []
        self.found: list[bool] = []
        self.keys: list[bytes] = []
        self.store_keys: list[bytes] = []
        self.deadline = 0.0
        self.pause = _RECHECK_SECONDS
        self.recheck_at = 0.0


class _Request:
    __slots__ = ("answers", "fresh", "serial")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.answers: dict[bytes, bool | None] = {}
        self.fresh: _Batch | None = None


class Lookups:
    """Lookups of one engine. Every method but `close` belongs to the scheduler's thread and returns at once.

    Args:
        client: the store; used from the thread only.
        timeout_seconds: deadline of an answer, from the end of the step that asked.
        progress: set whenever an answer has come.
    """

    def __init__(self, client: AsksStore, *, timeout_seconds: float, progress: threading.Event) -> None:
        self._progress = progress
        self._client = client
        self._timeout_seconds = timeout_seconds
        self._requests: dict[str, _Request] = {}
        self._asking: list[_Batch] = []
        self._alive: set[int] = set()  # serials of requests that still want answers; the thread only looks
        self._serial = 0
        self._answered: deque[tuple[_Batch, list[bool]]] = deque()
        self._ready = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._queued_keys = 0
        self._closed = False
        self.counts = {"hit": 0, "miss": 0, "timeout": 0, "full": 0}
        self.awaited = {"kept": 0, "late": 0}
        self._thread = start_thread(self._run, "lookup")

    # ---- the scheduler's thread

    def ask(
        self, req_id: str, key: bytes, store_key: bytes, *, end_token: int = 0, promise: Promise | None = None
    ) -> bool | None:
        """Whether the store has ``key``; None: not known yet, ask again in the next step.

        Args:
            req_id: the request that asks; what it learned is kept until `forget`.
            key: the chunk, as the engine names it.
            store_key: the chunk, as the store names it.
            end_token: where the chunk ends in the prompt, for ``promise``.
            promise: what another engine promised this request.
        """
        if self._answered:
            self._take_answers()
        request = self._requests.get(req_id)
        if request is None:
            self._serial += 1
            request = self._requests[req_id] = _Request(self._serial)
            self._alive.add(self._serial)
        elif key in request.answers:
            return request.answers[key]
        batch = request.fresh
        if batch is None:
            batch = request.fresh = _Batch(req_id, request.serial, promise)
            self._asking.append(batch)
        request.answers[key] = None
        batch.keys.append(key)
        batch.store_keys.append(store_key)
        if promise is not None and end_token <= promise.tokens:
            batch.promised.append(len(batch.keys) - 1)
        return None

    def flush(self) -> bool:
        """Send what was asked since the last call; whether there was anything."""
        if not self._asking:
            return False
        deadline = time.monotonic() + self._timeout_seconds
        fit: list[_Batch] = []
        with self._ready:
            for batch in self._asking:
                batch.deadline = deadline
                if self._queued_keys + len(batch.keys) <= _MAX_QUEUED_KEYS:
                    self._queued_keys += len(batch.keys)
                    fit.append(batch)
                else:
                    self._answered.append((batch, [False] * len(batch.keys)))
                    self.counts["full"] += len(batch.keys)
            self._queue.extend(fit)
            self._ready.notify()
        for batch in self._asking:
            request = self._requests.get(batch.req_id)
            if request is not None and request.fresh is batch:
                request.fresh = None
        self._asking = []
        return True

    def set_missing(self, req_id: str, keys: Sequence[bytes]) -> None:
        """The request must not hope for these any more: they were promised and did not come."""
        request = self._requests.get(req_id)
        if request is not None:
            request.answers.update(dict.fromkeys(keys, False))

    def forget(self, req_id: str) -> None:
        """The request is gone, or starts over and shall ask afresh; what is under way for it is dropped on arrival."""
        request = self._requests.pop(req_id, None)
        if request is not None:
            self._alive.discard(request.serial)
            if request.fresh is not None:
                self._asking.remove(request.fresh)

    def clear(self) -> None:
        """Forget every request's answers."""
        self._requests.clear()
        self._asking.clear()
        self._alive.clear()

    @property
    def open_requests(self) -> int:
        """For tests and bounds: requests remembered."""
        return len(self._requests)

    def close(self) -> None:
        """End the thread; waits for the call under way, at most its deadline."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join()

    def _take_answers(self) -> None:
        while self._answered:
            batch, found = self._answered.popleft()
            request = self._requests.get(batch.req_id)
            if request is None or request.serial != batch.serial:
                continue
            for key, has in zip(batch.keys, found, strict=True):
                if request.answers.get(key) is None:
                    request.answers[key] = has

    # ---- the thread

    def _run(self) -> None:
        waiting: list[_Batch] = []
        while True:
            fresh = self._next(min((batch.recheck_at for batch in waiting), default=None))
            if fresh is None:
                return
            try:
                waiting = self._work(fresh, waiting)
            except Exception:
                _log.exception("a lookup failed; it counts as a miss")
                for batch in fresh + waiting:
                    self._answer(batch, [False] * len(batch.keys), "timeout")
                waiting = []

    def _next(self, wake_at: float | None) -> list[_Batch] | None:
        with self._ready:
            while not self._queue and not self._closed:
                left = None if wake_at is None else wake_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._ready.wait(left)
            if self._closed:
                return None
            fresh = list(self._queue)
            self._queue.clear()
            self._queued_keys = 0
            return fresh

    def _work(self, fresh: list[_Batch], waiting: list[_Batch]) -> list[_Batch]:
        """Ask for all that is fresh at once, then for promises that are due; returns those that are still open."""
        now = time.monotonic()
        late = [batch for batch in fresh if batch.deadline <= now]
        for batch in late:
            self._answer(batch, [False] * len(batch.keys), "timeout")
        batches = [batch for batch in fresh if batch.deadline > now]
        if batches:
            timeout = min(batch.deadline - now for batch in batches)
            found, failed = self._ask([key for batch in batches for key in batch.store_keys], timeout)
            start = 0
            for batch in batches:
                part = found[start : start + len(batch.keys)]
                start += len(batch.keys)
                if self._promised(batch, part):
                    waiting.append(batch)
                else:
                    self._answer(batch, part, "timeout" if failed else "miss")
        return [batch for batch in waiting if self._still_awaited(batch)]

    def _ask(self, keys: list[bytes], timeout_seconds: float) -> tuple[list[bool], bool]:
        """Which of the keys are there, and whether the call failed."""
        before = _failures(self._client)
        found = self._client.exists_many(keys, timeout_seconds=timeout_seconds)
        return found, _failures(self._client) != before

    def _promised(self, batch: _Batch, found: list[bool]) -> bool:
        """Whether to await what is missing; notes it in the batch."""
        if batch.promise is None or not batch.promised:
            return False
        batch.found = found
        batch.promised = [index for index in batch.promised if not found[index]]
        if not batch.promised:
            self.awaited["kept"] += 1
            return False
        batch.recheck_at = min(time.monotonic() + batch.pause, batch.promise.until)
        return True

    def _still_awaited(self, batch: _Batch) -> bool:
        """Look for what a promise still lacks, a few chunks at a time; answers the batch when it is over."""
        now = time.monotonic()
        if batch.serial not in self._alive or batch.promise is None:
            return False
        if now < batch.recheck_at:
            return True
        wanted = batch.promised[:_CHUNKS_A_RECHECK]
        found, _ = self._ask([batch.store_keys[index] for index in wanted], self._timeout_seconds)
        for index, has in zip(wanted, found, strict=True):
            batch.found[index] = has
        batch.promised = [index for index in batch.promised if not batch.found[index]]
        if batch.promised and time.monotonic() < batch.promise.until:
            if all(found):  # more of them may be there
                batch.recheck_at = now
            else:
                batch.recheck_at = min(now + batch.pause, batch.promise.until)
                batch.pause = min(batch.pause * 2, _LONGEST_RECHECK_SECONDS)
            return True
        self.awaited["late" if batch.promised else "kept"] += 1
        self._answer(batch, batch.found, "miss")
        return False

    def _answer(self, batch: _Batch, found: list[bool], absent: str) -> None:
        hits = sum(found)
        self.counts["hit"] += hits
        self.counts[absent] += len(found) - hits
        self._answered.append((batch, found))
        self._progress.set()


def _failures(client: AsksStore) -> int:
    return sum(number for (_, outcome), number in client.counts.items() if outcome not in ("ok", "absent"))
