"""Chunks between the store and the rows of DRAM, on threads of their own: loads first, puts in chain order.

A load that did not come, or whose checksum is wrong, is reported as failed once no thread can write into its row any
more. A put is never made visible without the chunk before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from kvhearth.connector.puts import ChainPuts, PutItem
from kvhearth.connector.threads import start_thread
from kvhearth.store.client.client import StoreClient
from kvhearth.store.client.outcomes import GetResult, MissReason
from kvhearth.store.ring.client import StoreRing

_BATCH_BYTES = 8 << 20
_BATCH_CHUNKS = 64
_YIELD_SECONDS = 0.1

_log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """A job's end: one outcome a chunk (loads: ``ok`` or a `MissReason` value; puts: ``stored``, ``present``,
    ``orphan`` or ``failed``), the seconds it took and the bytes that moved."""

    job_id: int
    is_load: bool
    outcomes: list[str]
    seconds: float
    nbytes: int


class _Job:
    __slots__ = ("dead", "is_load", "job_id", "left", "nbytes", "outcomes", "started")

    def __init__(self, job_id: int, chunks: int, *, is_load: bool) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.outcomes = [""] * chunks
        self.left = chunks
        self.started = time.monotonic()
        self.nbytes = 0
        self.dead = False


class _LoadBatch(NamedTuple):
    job: _Job
    start: int
    keys: Sequence[bytes]
    chunk_ids: Sequence[int]


class Transfers:
    """The I/O of one engine.

    Args:
        client: the store; used from the threads only, with at least ``connections`` + 1 connections.
        rows: all of DRAM's rows, one after the other, as bytes (writable).
        row_bytes: length of a row; a value of any other length is not ours.
        connections: loads at once.
        load_timeout_seconds: deadline of a batch of loads.
        put_timeout_seconds: deadline of a batch of puts.
        progress: set whenever a job has ended.
    """

    def __init__(
        self,
        client: StoreClient | StoreRing,
        rows: memoryview,
        row_bytes: int,
        *,
        connections: int,
        load_timeout_seconds: float,
        put_timeout_seconds: float,
        progress: threading.Event,
    ) -> None:
        self._progress = progress
        self._client = client
        self._rows = rows
        self._row_bytes = row_bytes
        self._load_timeout_seconds = load_timeout_seconds
        self._batch_chunks = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // row_bytes))
        self._changed = threading.Condition()
        self._loads: deque[_LoadBatch] = deque()
        self._puts: deque[tuple[_Job, int, PutItem]] = deque()
        self._active_loads = 0
        self._active_puts = 0
        self._closed = False
        self._finished: deque[Finished] = deque()
        self._chains = ChainPuts(client, self._row, put_timeout_seconds)
        loops = {f"load-{i}": self._load_loop for i in range(connections)} | {"put": self._put_loop}
        self._threads = [start_thread(self._guard(loop), name) for name, loop in loops.items()]

    # ---- the scheduler's thread

    def load(self, job_id: int, keys: Sequence[bytes], chunk_ids: Sequence[int]) -> None:
        """Fetch each key into its row."""
        job = _Job(job_id, len(keys), is_load=True)
        if not keys:
            self._end(job)
            return
        size = self._batch_chunks
        with self._changed:
            for start in range(0, len(keys), size):
                batch = _LoadBatch(job, start, keys[start : start + size], chunk_ids[start : start + size])
                self._loads.append(batch)
            self._changed.notify_all()

    def put(self, job_id: int, items: Sequence[PutItem]) -> None:
        """Store rows, in this order, behind those of earlier calls."""
        job = _Job(job_id, len(items), is_load=False)
        if not items:
            self._end(job)
            return
        with self._changed:
            self._puts.extend((job, index, item) for index, item in enumerate(items))
            self._changed.notify_all()

    @property
    def queued_put_bytes(self) -> int:
        """KV that waits to be put or is being put."""
        return (len(self._puts) + self._active_puts) * self._row_bytes

    @property
    def is_loading(self) -> bool:
        """Whether a load waits or is under way."""
        return bool(self._loads or self._active_loads)

    def finished(self) -> list[Finished]:
        """Jobs that ended since the last call."""
        ended = []
        while self._finished:
            ended.append(self._finished.popleft())
        return ended

    def drain(self) -> None:
        """Give up what is queued and wait for what is under way (at most its deadline): no row is touched after."""
        with self._changed:
            self._cancel_queued()
            while self._active_loads or self._active_puts:
                self._changed.wait()

    def close(self) -> None:
        """`drain`, then end the threads and let go of the rows."""
        self.drain()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._cancel_queued()
        self._rows.release()

    # ---- shared

    def _row(self, chunk_id: int) -> memoryview:
        start = chunk_id * self._row_bytes
        return self._rows[start : start + self._row_bytes]

    def _cancel_queued(self) -> None:
        for batch in self._loads:
            self._settle(batch.job, batch.start, ["cancelled"] * len(batch.keys))
        self._loads.clear()
        for job, index, _ in self._puts:
            self._settle(job, index, ["failed"])
        self._puts.clear()

    def _settle(self, job: _Job, start: int, outcomes: list[str]) -> None:
        """Note how chunks of a job ended; the last ones end the job. Batches of one job may end on several threads."""
        with self._changed:
            job.outcomes[start : start + len(outcomes)] = outcomes
            job.left -= len(outcomes)
            if not job.left:
                self._end(job)

    def _end(self, job: _Job) -> None:
        seconds = time.monotonic() - job.started
        self._finished.append(Finished(job.job_id, job.is_load, job.outcomes, seconds, job.nbytes))
        self._progress.set()

    def _guard(self, loop: Callable[[], bool]) -> Callable[[], None]:
        def run() -> None:
            while True:
                try:
                    if not loop():
                        return
                except Exception:
                    _log.exception("a transfer failed")

        return run

    # ---- loads

    def _load_loop(self) -> bool:
        with self._changed:
            while not self._loads and not self._closed:
                self._changed.wait()
            if not self._loads:
                return False
            batch = self._loads.popleft()
            self._active_loads += 1
        outcomes = ["error"] * len(batch.keys)
        try:
            outcomes = self._fetch(batch)
        finally:
            self._settle(batch.job, batch.start, outcomes)
            with self._changed:
                self._active_loads -= 1
                self._changed.notify_all()
        return True

    def _fetch(self, batch: _LoadBatch) -> list[str]:
        if batch.job.dead:  # the store did not answer for its first chunks; what follows them is of no use
            return ["skipped"] * len(batch.keys)
        rows = [self._row(chunk_id) for chunk_id in batch.chunk_ids]
        results = self._client.get_many_into(batch.keys, rows, timeout_seconds=self._load_timeout_seconds)
        outcomes = [self._outcome(result) for result in results]
        moved = sum(result.nbytes for result in results)
        with self._changed:
            batch.job.nbytes += moved
        if MissReason.TIMEOUT.value in outcomes or MissReason.UNREACHABLE.value in outcomes:
            batch.job.dead = True
        return outcomes

    def _outcome(self, result: GetResult) -> str:
        if result.reason is not None:
            return result.reason.value
        return "ok" if result.nbytes == self._row_bytes else "length"

    # ---- puts

    def _put_loop(self) -> bool:
        with self._changed:
            while not self._puts and not self._closed:
                self._changed.wait()
            if not self._puts:
                return False
            if self._loads or self._active_loads:  # a request waits for a load, nobody for a put; but not for ever
                self._changed.wait_for(self._loads_done, _YIELD_SECONDS)
            batch = list(islice(self._puts, self._batch_chunks))
            for _ in batch:
                self._puts.popleft()
            self._active_puts = len(batch)
        if not batch:
            return True
        outcomes = ["failed"] * len(batch)
        try:
            outcomes = self._chains.put([item for _, _, item in batch])
        finally:
            with self._changed:
                for (job, index, _), outcome in zip(batch, outcomes, strict=True):
                    job.nbytes += self._row_bytes if outcome == "stored" else 0
                    self._settle(job, index, [outcome])
                self._active_puts = 0
                self._changed.notify_all()
        return True

    def _loads_done(self) -> bool:
        return self._closed or not (self._loads or self._active_loads)
