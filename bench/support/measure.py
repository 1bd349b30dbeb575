"""One measurement of a side in the store's benchmark: bytes a second and the server's CPU time, or a lookup's time."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvhearth.store.client.outcomes import Miss
from kvhearth.store.protocol.header import HEADER_BYTES
from support.lanes import Lane, RespLane

SIZES = (HEADER_BYTES + 2 * 2**20, HEADER_BYTES + 16 * 2**20)
MAX_CONNECTIONS = 4
LOOKUP_KEYS = 256
SPREAD_BYTES = 33 * 2**20
"""Each connection goes round so many bytes of values, and of its own memory, that no cache holds them all."""
# Written once, so that no measurement pays for the first touch of its memory.
BUFFERS = [memoryview(bytearray(os.urandom(SPREAD_BYTES))) for _ in range(MAX_CONNECTIONS)]


class Side(NamedTuple):
    """What is measured: a server behind a transport, or a ceiling.

    Attributes:
        connect: opens a connection.
        pid: the server's process, None where there is none.
        lookup: the request that asks how many of `lookup_keys` there are; None where there is no such thing.
        max_threads: more would not be the ceiling that it is meant to be.
        max_rounds: measured in the first rounds only, as it is slow.
    """

    system: str
    transport: str
    connect: Callable[[], Lane]
    pid: int | None = None
    lookup: bytes | None = None
    max_threads: int = MAX_CONNECTIONS
    max_rounds: int = 1_000

    @property
    def name(self) -> str:
        """System and transport."""
        return f"{self.system} {self.transport}"


class Case(NamedTuple):
    """What is done: ``get``, ``put``, ``lookup``, or ``lookup busy`` (while all connections get values of 2 MB)."""

    operation: str
    nbytes: int
    connections: int


class Run(NamedTuple):
    """GB/s over all connections and the server's CPU seconds a GB; or the milliseconds of a lookup (median)."""

    figure: float
    cpu: float


def measure(case: Case, side: Side, seconds: float) -> Run:
    """Measure ``case`` for about ``seconds``."""
    if case.operation == "lookup":
        return _lookup(side, seconds)
    if case.operation == "lookup busy":
        with _load(side):
            return _lookup(side, seconds)
    return _move(case, side, seconds)


def fill(side: Side) -> None:
    """Put every value and key that the cases ask for, and see that values come back as they were put."""
    lane = side.connect()
    for nbytes in SIZES:
        came = memoryview(bytearray(nbytes))
        values = [value for connection in range(MAX_CONNECTIONS) for value in _values(connection, nbytes)]
        for slot, row in values:
            lane.put(slot, row)
        for slot, row in values:
            lane.get(slot, came)
            if came != row:
                raise SystemExit(f"{side.name}: a value came back changed")
    lane.close()


def _values(connection: int, nbytes: int) -> list[tuple[int, memoryview]]:
    """The slots of a connection's values, and its own memory for each."""
    count, buffer = SPREAD_BYTES // nbytes, BUFFERS[connection]
    return [(connection * count + n, buffer[n * nbytes : (n + 1) * nbytes]) for n in range(count)]


def lookup_keys() -> list[bytes]:
    """The keys that lookups ask for."""
    return [b"%064d" % index for index in range(LOOKUP_KEYS)]


def cpu_seconds(pid: int) -> float:
    """CPU time of another process so far, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


def _move(case: Case, side: Side, seconds: float) -> Run:
    threads = min(case.connections, side.max_threads)
    start = threading.Barrier(threads + 1)
    rates: list[float] = []
    moved: list[int] = []
    failures: list[BaseException] = []

    def work(connection: int) -> None:
        try:
            lane = side.connect()
            call = lane.get if case.operation == "get" else lane.put
            values = itertools.cycle(_values(connection, case.nbytes))
            call(*next(values))  # the connection's windows open
            start.wait()
            count, began = 0, time.perf_counter()
            while (now := time.perf_counter()) - began < seconds:
                call(*next(values))
                count += 1
            rates.append(count * case.nbytes / (now - began))
            moved.append(count * case.nbytes)
            lane.close()
        except (SystemExit, Miss, threading.BrokenBarrierError) as failure:
            failures.append(failure)
            start.abort()

    workers = [threading.Thread(target=work, args=(connection,), daemon=True) for connection in range(threads)]
    for worker in workers:
        worker.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        start.wait()
    before = cpu_seconds(side.pid) if side.pid else 0.0
    for worker in workers:
        worker.join()
    if failures or len(rates) < threads:
        raise SystemExit(f"{side.name}: a connection failed: {failures}")
    spent = cpu_seconds(side.pid) - before if side.pid else 0.0
    return Run(sum(rates) / 1e9, spent / sum(moved) * 1e9)


def _lookup(side: Side, seconds: float) -> Run:
    assert side.lookup is not None
    lane = side.connect()
    assert isinstance(lane, RespLane)
    took = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        if lane.count(side.lookup) != LOOKUP_KEYS:
            raise SystemExit(f"{side.name}: a key that was put is gone")
        took.append(time.perf_counter() - began)
    lane.close()
    return Run(statistics.median(took) * 1e3, 0.0)


@contextlib.contextmanager
def _load(side: Side) -> Iterator[None]:
    """Get values over all connections meanwhile."""
    stop = threading.Event()

    def work(connection: int) -> None:
        lane = side.connect()
        for value in itertools.cycle(_values(connection, SIZES[0])):
            if stop.is_set():
                break
            lane.get(*value)
        lane.close()

    workers = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(MAX_CONNECTIONS)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        stop.set()
        for worker in workers:
            worker.join()
