"""What a tier did, counted, and how a scrape sees it. Decides nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from kvhearth.metrics import store_tiers as m
from kvhearth.metrics.spec import Metric, MetricFamily
from kvhearth.store.tiers.files import FileError
from kvhearth.store.tiers.guard import TierError
from kvhearth.store.tiers.port import TierStats


class Counts:
    """What a tier did, counted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads = 0
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.writes = 0
        self.written_bytes = 0
        self.write_seconds = 0.0
        self.evictions = 0
        self._misses: dict[str, int] = {}
        self._refused: dict[str, int] = {}

    def read_by(self, read: Callable[[], int]) -> bool:
        """Read a value by ``read``, which returns its bytes or raises `TierError` or `FileError`; whether it came."""
        began = time.monotonic()
        try:
            nbytes = read()
        except TierError as error:
            self._missed(error.reason.value)
            return False
        except FileError as error:
            self._missed(error.flaw.value)
            return False
        with self._lock:
            self.reads += 1
            self.read_bytes += nbytes
            self.read_seconds += time.monotonic() - began
        return True

    def written_by(self, write: Callable[[], int]) -> bool:
        """Write a value by ``write``, which returns its bytes or raises `TierError`; whether it was kept."""
        began = time.monotonic()
        try:
            nbytes = write()
        except TierError as error:
            with self._lock:
                reason = error.reason.value
                self._refused[reason] = self._refused.get(reason, 0) + 1
            return False
        with self._lock:
            self.writes += 1
            self.written_bytes += nbytes
            self.write_seconds += time.monotonic() - began
        return True

    def evicted(self, values: int) -> None:
        """Values were dropped to make room."""
        with self._lock:
            self.evictions += values

    def _missed(self, reason: str) -> None:
        with self._lock:
            self._misses[reason] = self._misses.get(reason, 0) + 1

    def stats(
        self,
        *,
        items: int,
        value_bytes: int,
        stored_bytes: int,
        capacity_bytes: int,
        is_down: bool,
        ready: bool,
    ) -> TierStats:
        """The counts beside what the tier holds now."""
        with self._lock:
            return TierStats(
                items=items,
                value_bytes=value_bytes,
                stored_bytes=stored_bytes,
                capacity_bytes=capacity_bytes,
                reads=self.reads,
                read_bytes=self.read_bytes,
                writes=self.writes,
                written_bytes=self.written_bytes,
                evictions=self.evictions,
                misses=dict(self._misses),
                refused=dict(self._refused),
                is_down=is_down,
                ready=ready,
            )


def families(name: str, stats: TierStats, counts: Counts, *, writes_down: bool) -> Iterator[MetricFamily]:
    """The metrics of the tier called ``name``."""
    up = (("read", stats.is_down), ("write", stats.is_down or writes_down))
    yield MetricFamily(m.UP, [((name, operation), float(not down)) for operation, down in up])
    yield MetricFamily(m.MISSES, [((name, reason), float(number)) for reason, number in stats.misses.items()])
    yield MetricFamily(m.REFUSED, [((name, reason), float(number)) for reason, number in stats.refused.items()])
    for metric, number in (
        (m.READY, stats.ready),
        (m.ITEMS, stats.items),
        (m.VALUES, stats.value_bytes),
        (m.STORED, stats.stored_bytes),
        (m.CAPACITY, stats.capacity_bytes),
        (m.READS, stats.reads),
        (m.READ_BYTES, stats.read_bytes),
        (m.READ_SECONDS, counts.read_seconds),
        (m.WRITES, stats.writes),
        (m.WRITTEN_BYTES, stats.written_bytes),
        (m.WRITE_SECONDS, counts.write_seconds),
        (m.EVICTIONS, stats.evictions),
    ):
        yield MetricFamily(metric, [((name,), float(number))])


def merged(found: Iterable[MetricFamily]) -> list[MetricFamily]:
    """The families of several tiers, one for each metric: an exposition must not show a metric twice."""
    samples: dict[Metric, list[tuple[tuple[str, ...], float]]] = {}
    for family in found:
        samples.setdefault(family.metric, []).extend(family.samples)
    return [MetricFamily(metric, numbers) for metric, numbers in samples.items()]
