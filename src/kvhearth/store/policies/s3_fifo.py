"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023) over slots, sparing heads.

New chunks enter a small queue of a tenth of the bytes. Those used more than once while they pass through it move on to
the main queue, the others go and are remembered for a while: what comes back in that time enters the main queue. In
the main queue a chunk has as many more rounds as it was used, three at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.chains import Chains
from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.ghost import Ghost
from kvhearth.store.policies.queue import SlotQueue, Stamps

SMALL_SHARE = 10
"""The small queue has one in so many of the store's bytes."""

MOST_USES = 3
"""Uses are counted up to this."""

MOST_MOVES = 4096
"""Slots that one search moves on at most; past it a slot goes however often it was used, so that no search is long."""


class S3Fifo:
    """A slot that may not go when its turn comes starts anew at the end of its queue."""

    def __init__(self, facts: Facts, capacity_bytes: int) -> None:
        self._chains = Chains(facts)
        self._stamps = Stamps(facts.capacity)
        self._small, self._main = SlotQueue(self._stamps), SlotQueue(self._stamps)
        self._ghost = Ghost(facts.capacity)
        self._uses: NDArray[np.uint8] = np.zeros(facts.capacity, np.uint8)
        self._use = self._uses.data
        self._in_main: NDArray[np.uint8] = np.zeros(facts.capacity, np.uint8)
        self._is_main = self._in_main.data
        self._nbytes = facts.nbytes.data
        self._fingerprint = facts.fingerprint.data
        self._small_limit_bytes = capacity_bytes // SMALL_SHARE
        self._small_bytes = 0
        self._held = 0
        self._moves_left = 0

    def added(self, slot: int) -> None:
        """See `Policy`."""
        useless = self._chains.added(slot)
        self._held += 1
        self._use[slot] = 0
        if self._ghost.take(self._fingerprint[slot]):
            self._is_main[slot] = 1
            self._main.push(slot)
        else:
            self._is_main[slot] = 0
            self._small_bytes += self._nbytes[slot]
            if useless:
                self._small.push_front(slot)
            else:
                self._small.push(slot)

    def touched(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """See `Policy`. A slot given twice is used once."""
        index = np.asarray(slots, np.int64)
        self._uses[index] = np.minimum(self._uses[index] + 1, MOST_USES)

    def removed(self, slot: int, *, evicted: bool) -> None:
        """See `Policy`."""
        self._stamps.one[slot] = 0
        if not self._is_main[slot]:
            self._small_bytes -= self._nbytes[slot]
            if evicted:
                self._ghost.add(self._fingerprint[slot], self._held)
        self._held -= 1
        parent = self._chains.removed(slot, evicted=evicted)
        if parent >= 0:
            (self._main if self._is_main[parent] else self._small).recall(parent)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """See `Policy`."""
        self._moves_left = MOST_MOVES
        slot = self._search_small(may_go, down_to_bytes=self._small_limit_bytes)
        if slot is None:
            slot = self._search_main(may_go)
        if slot is None:  # of the small queue more than its share may have to go, and it may fill the main one anew
            slot = self._search_small(may_go, down_to_bytes=0)
        if slot is None:
            slot = self._search_main(may_go)
        return self._chains.last_resort(may_go) if slot is None else slot

    def worst(self, slots: NDArray[np.int64]) -> int:
        """See `Policy`."""
        ends = self._chains.first_to_go(slots)
        order = np.lexsort((self._stamps.of[ends], self._in_main[ends], self._uses[ends]))
        return int(ends[order[0]])

    def _search_small(self, may_go: Callable[[int], bool], *, down_to_bytes: int) -> int | None:
        newest, queue = self._stamps.now, self._small
        while (slot := queue.front()) >= 0 and self._stamps.one[slot] <= newest:
            if self._small_bytes < down_to_bytes and self._main.front() >= 0:
                return None
            if self._use[slot] > 1 and self._moves_left:
                self._moves_left -= 1
                self._small_bytes -= self._nbytes[slot]
                self._is_main[slot], self._use[slot] = 1, 0
                self._main.push(slot)
            elif self._chains.is_followed(slot):
                queue.skip()
            elif may_go(slot):
                return slot
            else:
                queue.push(slot)
        return None

    def _search_main(self, may_go: Callable[[int], bool]) -> int | None:
        for _ in range(MOST_USES + 1):
            newest, queue = self._stamps.now, self._main
            while (slot := queue.front()) >= 0 and self._stamps.one[slot] <= newest:
                uses = self._use[slot]
                if uses and self._moves_left:
                    self._moves_left -= 1
                    self._use[slot] = uses - 1
                    queue.push(slot)
                elif self._chains.is_followed(slot):
                    queue.skip()
                elif may_go(slot):
                    return slot
                else:
                    queue.push(slot)
        return None
