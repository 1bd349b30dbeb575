"""A tier in memory that fails on demand, and how the tests of what uses tiers put, get and wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvhearth.metrics import MetricFamily
from kvhearth.store.dram.table import Published, Table
from kvhearth.store.server.tiered import Tiered
from kvhearth.store.tiers.port import TierStats

SECONDS = 10.0


def eventually(check: Callable[[], object]) -> None:
    """Wait until ``check`` holds."""
    give_up = time.monotonic() + SECONDS
    while not check():
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.002)


def in_threads(*works: Callable[[], object]) -> None:
    """Run all at once; an error in one is an error here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * SECONDS)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


class Gate:
    """Where a tier's calls wait while it is shut."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self._arrivals = threading.Semaphore(0)

    def shut(self) -> None:
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def await_arrival(self) -> None:
        """Wait until one more call stands before the gate."""
        assert self._arrivals.acquire(timeout=SECONDS), "nobody came"

    def through(self, until: float) -> bool:
        if self._opened.is_set():
            return True
        self._arrivals.release()
        return self._opened.wait(max(0.0, until - time.monotonic()))


class FakeTier:
    """A tier that is a dictionary. Nothing of it raises, as `Tier` asks."""

    def __init__(self, name: str = "disk", letter: bytes = b"k") -> None:
        self.name, self.letter = name, letter
        self.ready, self.is_down = True, False
        self.values: dict[bytes, bytes] = {}
        self.unfound: set[bytes] = set()
        """Values that it does not know of yet: a search for them is under way."""
        self.fails = False
        self.error: Exception | None = None
        """What reads and writes raise, which no tier should."""
        self.says_too_long = False
        self.seconds = 0.0
        """How long reads and writes take."""
        self.write_timeout_seconds = SECONDS
        self.before_write, self.after_write = Gate(), Gate()
        self.before_read, self.after_read = Gate(), Gate()
        self.before_delete = Gate()
        self.reads: list[bytes] = []
        self.writes: list[bytes] = []
        self.started = self.closed = False

    def open_gates(self) -> None:
        for gate in vars(self).values():
            if isinstance(gate, Gate):
                gate.open()

    def start(self) -> None:
        self.started = True

    def close(self) -> None:
        self.closed = True

    def has(self, keys: Sequence[bytes]) -> list[int]:
        if self.is_down:
            return [0] * len(keys)
        extra = int(self.says_too_long)
        found = {key: self.values[key] for key in keys if key in self.values and key not in self.unfound}
        return [len(found[key]) + extra if key in found else 0 for key in keys]

    def read_into(self, key: bytes, views: list[memoryview], deadline: float) -> bool:
        self.reads.append(key)
        if self.error is not None:
            raise self.error
        if self.fails or self.is_down or not self.before_read.through(deadline):
            return False
        time.sleep(self.seconds)
        value = self.values.get(key)
        if value is None or len(value) != sum(map(len, views)):
            return False
        if not self.after_read.through(deadline):
            return False
        for view in views:
            view[:], value = value[: len(view)], value[len(view) :]
        return True

    def write(self, key: bytes, views: list[memoryview]) -> bool:
        self.writes.append(key)
        if self.error is not None:
            raise self.error
        until = time.monotonic() + self.write_timeout_seconds
        value = b"".join(views)
        if self.fails or self.is_down or not self.before_write.through(until):
            return False
        time.sleep(self.seconds)
        self.values[key] = value
        self.after_write.through(until)
        return True

    def delete(self, keys: Sequence[bytes]) -> int:
        self.before_delete.through(time.monotonic() + SECONDS)
        return sum(self.values.pop(key, None) is not None for key in keys)

    def clear(self) -> None:
        self.values.clear()

    def keys(self) -> Iterator[bytes]:
        return iter(list(self.values))

    def stats(self) -> TierStats:
        nbytes = sum(map(len, list(self.values.values())))
        return TierStats(
            len(self.values), nbytes, nbytes, 0, len(self.reads), 0, len(self.writes), 0, 0, {}, {}, self.is_down, True
        )

    def metrics(self) -> Iterable[MetricFamily]:
        return ()


def put(store: Tiered, key: bytes, value: bytes, **more: object) -> Published:
    """As a connection does it."""
    upload = store.table.reserve(len(value))
    if upload is None:
        return Published.NO_ROOM
    for view in store.table.upload_views(upload):
        view[:], value = value[: len(view)], value[len(view) :]
    return store.publish(key, upload, **more)  # type: ignore[arg-type]


def get(store: Tiered, key: bytes) -> bytes | None:
    """As a connection does it."""
    slot = store.lease(key)
    if slot is None:
        return None
    try:
        return b"".join(store.table.views(slot))
    finally:
        store.table.release(slot)


def is_empty(table: Table) -> bool:
    """Whether nothing is held, leased or uploaded."""
    stats = table.stats()
    return not (stats.used_bytes or stats.items or stats.uploading_bytes or stats.pinned_bytes or stats.value_bytes)
