"""Saves values in the lower tiers: at once (write-through), or when they are about to leave DRAM (write-back). Nothing
waits for it; a value that no tier takes in time is let go as if there were none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.events import EventKind
from kvhearth.store.dram.table import Table
from kvhearth.store.server.crossings import Crossings
from kvhearth.store.tiers.port import Tier

_log = logging.getLogger(__name__)

_THREADS = {"disk": 2}
_OTHER_THREADS = 8
_LOW_SHARE = 16
_QUEUE_SHARE = 8
_POLL_SECONDS = 0.2


class _Job:
    """A leased value on its way to one tier or more."""

    __slots__ = ("is_victim", "key", "nbytes", "pending", "slot")

    def __init__(self, key: bytes, slot: int, nbytes: int, is_victim: bool) -> None:
        self.key = key
        self.slot = slot
        self.nbytes = nbytes
        self.is_victim = is_victim
        self.pending = 1


class Lane:
    """One tier's queue. ``bit`` stands for the tier in the table's column of what is saved where."""

    def __init__(self, tier: Tier, bit: int, max_bytes: int) -> None:
        self.tier = tier
        self.bit = bit
        self.outcomes = {"saved": 0, "refused": 0, "skipped": 0}
        self._max_bytes = max_bytes
        self.queued_bytes = 0
        self.jobs: deque[_Job] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Whether one more value may wait here. One may always, so that none is too large for it."""
        return not self.tier.is_down and (not self.jobs or self.queued_bytes + nbytes <= self._max_bytes)


class Mover:
    """Threads that save.

    Args:
        table: where values are; the mover makes room in it when memory runs low.
        tiers: where they go.
        crossings: what else is under way, by key.
        write_through: save each value when it is put, not only before it goes.
        min_sights: values are saved from their n-th put or use on.
    """

    def __init__(
        self, table: Table, tiers: Sequence[Tier], crossings: Crossings, write_through: bool, min_sights: int
    ) -> None:
        capacity = table.stats().capacity_bytes
        self._table = table
        self._crossings = crossings
        self._write_through = write_through
        self._min_sights = min_sights
        table.counts_sights = min_sights > 1
        self._lanes = [Lane(tier, 1 << n, capacity // _QUEUE_SHARE) for n, tier in enumerate(tiers)]
        self._changed = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._pressed = threading.Event()
        table.low_pages = capacity // PAGE_BYTES // _LOW_SHARE
        table.on_pressure = self._pressed.set

    def start(self) -> None:
        """Begin."""
        self._spawn(self._relieve, "kvhearth-store-relieve")
        for lane in self._lanes:
            for _ in range(_THREADS.get(lane.tier.name, _OTHER_THREADS)):
                self._spawn(partial(self._work, lane), f"kvhearth-store-{lane.tier.name}")

    def close(self, seconds: float = 5.0) -> None:
        """Finish what is being written, drop what waits, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pressed.set()
        give_up = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))

    def flush(self, seconds: float) -> bool:
        """Save what no tier has yet, as far as it goes until then; for an orderly stop. Whether all of it was done."""
        give_up = time.monotonic() + seconds
        cursor = 0
        while time.monotonic() < give_up:
            keys, cursor = self._table.keys_from(cursor, 256)
            for key in keys:
                while not self.offer(key) and time.monotonic() < give_up:
                    time.sleep(0.005)
            if not cursor:
                break
        while any(lane.queued_bytes for lane in self._lanes) and time.monotonic() < give_up:
            time.sleep(0.005)
        return not any(lane.queued_bytes for lane in self._lanes)

    def put(self, key: bytes) -> None:
        """A value was put: with write-through, save it."""
        if self._write_through:
            self.offer(key)

    def offer(self, key: bytes) -> bool:
        """Save the value under ``key`` where it is not yet. False when some tier that is up cannot take it just now."""
        wanted = sum(lane.bit for lane in self._lanes if not lane.tier.is_down)
        slot = self._table.lease_slot(key, wanted) if wanted else None
        if slot is None:
            return True
        if self._table.sights(slot) < self._min_sights:
            self._table.release(slot)
            return True
        return self._enqueue(slot, is_victim=False)

    def metrics(self) -> Iterable[MetricFamily]:
        """For a scrape."""
        with self._changed:
            outcomes = [
                ((lane.tier.name, outcome), float(number))
                for lane in self._lanes
                for outcome, number in lane.outcomes.items()
            ]
            queued = [((lane.tier.name,), float(lane.queued_bytes)) for lane in self._lanes]
        yield MetricFamily(m.SAVES, outcomes)
        yield MetricFamily(m.SAVE_QUEUE, queued)

    # ---- internals

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _relieve(self) -> None:
        while not self._closed:
            self._pressed.wait(_POLL_SECONDS)
            self._pressed.clear()
            while self._table.is_low and not self._closed and self._let_one_go():
                pass

    def _let_one_go(self) -> bool:
        able = [lane for lane in self._lanes if not lane.tier.is_down]
        slot = self._table.lease_victim() if able else None
        if slot is None:
            return False
        # Asked anew: what is hot here is looked up here, so it is cold below, and goes there first.
        key = self._table.key_of(slot)
        self._table.note_lost(slot, sum(lane.bit for lane in able if not lane.tier.has([key])[0]))
        wanted = self._table.wants_saving(slot, sum(lane.bit for lane in able))
        if not wanted or self._table.sights(slot) < self._min_sights:
            self._table.drop_leased(slot)
        else:
            self._enqueue(slot, is_victim=True)
        return True

    def _enqueue(self, slot: int, *, is_victim: bool) -> bool:
        job = _Job(self._table.key_of(slot), slot, self._table.nbytes(slot), is_victim)
        complete = True
        with self._changed:
            for lane in self._lanes:
                if not self._table.wants_saving(slot, lane.bit):
                    continue
                if self._closed or not self._room_in(lane, job) or not self._crossings.begin_save(job.key, lane.bit):
                    lane.outcomes["skipped"] += 1
                    complete = complete and lane.tier.is_down
                    continue
                job.pending += 1
                lane.queued_bytes += job.nbytes
                lane.jobs.append(job)
            self._changed.notify_all()
        self._one_less(job)
        return complete

    def _room_in(self, lane: Lane, job: _Job) -> bool:
        # Who makes room waits for the tier, a moment; who puts does not.
        if job.is_victim and not lane.has_room(job.nbytes):
            self._changed.wait_for(lambda: self._closed or lane.has_room(job.nbytes), _POLL_SECONDS)
        return lane.has_room(job.nbytes)

    def _work(self, lane: Lane) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or lane.jobs)
                if not lane.jobs:
                    return
                job = lane.jobs.popleft()
            outcome, is_outdated = "skipped", False
            try:
                if not self._closed:
                    outcome, is_outdated = self._save(lane, job)
            except Exception:  # out of memory, say; what comes next may go
                outcome = "refused"
                _log.exception("a value could not be saved in the %s tier", lane.tier.name)
            finally:
                self._crossings.end_save(job.key, lane.bit)
                with self._changed:
                    lane.queued_bytes -= job.nbytes
                    self._changed.notify_all()
                self._one_less(job)
            with self._changed:
                lane.outcomes[outcome] += 1
            if is_outdated:
                self.put(job.key)  # its successor could not be saved meanwhile

    def _save(self, lane: Lane, job: _Job) -> tuple[str, bool]:
        # Deleted or put anew meanwhile: what was written is not what is to be found.
        if not self._table.is_current(job.slot):
            return "skipped", True
        if not lane.tier.write(job.key, self._table.views(job.slot)):
            return "refused", not self._table.is_current(job.slot)
        if self._table.mark_saved(job.slot, lane.bit, lane.tier.letter):
            if not lane.tier.has([job.key])[0]:  # gone again, which was told before it was told to be there
                self._table.note_lost(job.slot, lane.bit)
                self._table.events.append(EventKind.EVICT, lane.tier.letter, job.key)
            return "saved", False
        lane.tier.delete([job.key])
        return "skipped", True

    def _one_less(self, job: _Job) -> None:
        with self._changed:
            job.pending -= 1
            last = not job.pending
        if last and job.is_victim:
            self._table.drop_leased(job.slot)
        elif last:
            self._table.release(job.slot)
