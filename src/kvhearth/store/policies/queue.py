"""Queues of slots in which a slot's place is its last one: moving to the back is an append, and places left behind are
swept away later, a block at a time, so that no call is long.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BLOCK = 4096
_SLACK = 4 * _BLOCK
_SWEEP_FROM = 1.5  # times the places that the last sweep left
_SWEPT_AT_ONCE = 4  # blocks swept for each one filled: a sweep ends before as many new places have come


class Stamps:
    """When each slot was last queued, in any of the queues that share this: int64 ``of`` by slot, 0 for never and
    negative for before all others."""

    def __init__(self, capacity: int) -> None:
        self.of: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.one = self.of.data
        self.now = 0
        self._first = 0

    def first(self, slot: int) -> int:
        """Stamp one slot before all others."""
        self._first -= 1
        self.one[slot] = self._first
        return self._first

    def next(self, slot: int) -> int:
        """Stamp one slot."""
        self.now += 1
        self.one[slot] = self.now
        return self.now

    def next_many(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stamp slots in order; of a slot given twice the later place counts."""
        stamps = np.arange(self.now + 1, self.now + 1 + len(slots))
        self.of[slots] = stamps
        self.now += len(slots)
        return stamps


class _Block(NamedTuple):
    slots: NDArray[np.int32]
    stamps: NDArray[np.int64]


class SlotQueue:
    """First in, first out. A slot is in the queue where it was pushed last while `Stamps` still says so: stamping it
    anew (in whichever queue), or zeroing its stamp, takes it out.

    The slot in front may be passed over with `skip`, and be called back to where it was with `recall`.
    At most about two places are kept for each slot in the queue, at 12 bytes.
    """

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._swept: deque[_Block] = deque()
        self._unswept: deque[_Block] = deque()  # behind the swept ones
        self._sweeping = False
        self._places = 0
        self._places_after_sweep = 0
        self._open_slots, self._open_stamps = np.empty(_BLOCK, np.int32), np.empty(_BLOCK, np.int64)
        self._open_slot, self._open_stamp = self._open_slots.data, self._open_stamps.data
        self._filled = 0
        self._front_slots: list[int] = []  # the block that is being taken from
        self._front_stamps: list[int] = []
        self._at = 0
        self._passed = 0  # the stamp of the last slot passed over
        self._recalled: list[tuple[int, int]] = []  # heap of (stamp, slot), before all that is in the blocks
        self._recalled_stamp: dict[int, int] = {}

    def push(self, slot: int) -> None:
        """Put a slot at the back."""
        self._open_stamp[self._filled] = self._stamps.next(slot)
        self._open_slot[self._filled] = slot
        self._filled += 1
        if self._filled == _BLOCK:
            self._close()

    def push_many(self, slots: NDArray[np.int64]) -> None:
        """Put slots at the back, one after another."""
        self.push_stamped(slots, self._stamps.next_many(slots))

    def push_stamped(self, slots: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        """Put slots at the back that have just been stamped, in the order of their stamps."""
        for start in range(0, len(slots), _BLOCK):
            self._append(slots[start : start + _BLOCK], stamps[start : start + _BLOCK])

    def push_front(self, slot: int) -> None:
        """Put a slot before all others, while not too many are there already; else at the back."""
        if len(self._recalled) >= _BLOCK:
            self.push(slot)
        else:
            self._recall_at(slot, self._stamps.first(slot))

    @property
    def is_empty(self) -> bool:
        """True when there is surely none; False may mean that only places are there that were left."""
        return not (self._places or self._filled or self._recalled or self._at < len(self._front_slots))

    def front(self) -> int:
        """The slot that is first, -1 when there is none. It stays."""
        one = self._stamps.one
        while self._recalled:
            stamp, slot = self._recalled[0]
            if one[slot] == stamp:
                return slot
            self._drop_recalled()
        while True:
            slots, stamps, at = self._front_slots, self._front_stamps, self._at
            while at < len(slots):
                if one[slots[at]] == stamps[at]:
                    self._at = at
                    return slots[at]
                at += 1
            self._at = at
            if not self._next_block():
                return -1

    def skip(self) -> None:
        """Pass over the slot that `front` has just named. It keeps its stamp and is out of the queue until `recall`."""
        if self._recalled:
            self._drop_recalled()
        else:
            self._passed = self._front_stamps[self._at]
            self._at += 1

    def recall(self, slot: int) -> None:
        """If the slot was passed over and not stamped since, it is back, in the order of the stamps."""
        stamp = self._stamps.one[slot]
        if stamp <= self._passed and self._recalled_stamp.get(slot) != stamp:
            self._recall_at(slot, stamp)

    def _recall_at(self, slot: int, stamp: int) -> None:
        self._recalled_stamp[slot] = stamp
        heapq.heappush(self._recalled, (stamp, slot))

    def _drop_recalled(self) -> None:
        stamp, slot = heapq.heappop(self._recalled)
        if self._recalled_stamp.get(slot) == stamp:
            del self._recalled_stamp[slot]

    def _append(self, slots: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
        if self._filled + len(slots) > _BLOCK:
            self._close()
        end = self._filled + len(slots)
        self._open_slots[self._filled : end] = slots
        self._open_stamps[self._filled : end] = stamps
        self._filled = end
        if end == _BLOCK:
            self._close()

    def _close(self) -> None:
        filled, self._filled = self._filled, 0
        self._unswept.append(_Block(self._open_slots[:filled].copy(), self._open_stamps[:filled].copy()))
        self._places += filled
        if not self._sweeping and self._places > self._places_after_sweep * _SWEEP_FROM + _SLACK:
            self._sweeping = True
            self._swept.extend(self._unswept)
            self._unswept, self._swept = self._swept, deque()
        if self._sweeping:
            for _ in range(_SWEPT_AT_ONCE):
                self._sweep_block()

    def _sweep_block(self) -> None:
        if not self._unswept:
            self._sweeping = False
            self._places_after_sweep = self._places
            return
        block = self._take(self._unswept)
        if not len(block.slots):
            return
        self._places += len(block.slots)
        if self._swept and len(self._swept[-1].slots) + len(block.slots) <= _BLOCK:
            last = self._swept.pop()
            block = _Block(np.concatenate((last.slots, block.slots)), np.concatenate((last.stamps, block.stamps)))
        self._swept.append(block)

    def _take(self, blocks: deque[_Block]) -> _Block:
        """The first of the blocks, without the places that were left."""
        slots, stamps = blocks.popleft()
        self._places -= len(slots)
        stays = self._stamps.of[slots] == stamps
        return _Block(slots[stays], stamps[stays])

    def _next_block(self) -> bool:
        if not self._swept and not self._unswept:
            if not self._filled:
                return False
            self._close()
        slots, stamps = self._take(self._swept or self._unswept)
        self._front_slots, self._front_stamps, self._at = slots.tolist(), stamps.tolist(), 0
        return True
