"""Least recently used first, but for a chunk that others in the store follow: it outlives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.chains import Chains
from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.queue import SlotQueue, Stamps


class Lru:
    """The victim is the least recently used of the slots that no held chunk follows.

    A slot that may not go when its turn comes counts as just used, so that the next search does not start with it.
    """

    def __init__(self, facts: Facts) -> None:
        self._chains = Chains(facts)
        self._stamps = Stamps(facts.capacity)
        self._queue = SlotQueue(self._stamps)

    def added(self, slot: int) -> None:
        """See `Policy`."""
        if self._chains.added(slot):
            self._queue.push_front(slot)
        else:
            self._queue.push(slot)

    def touched(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """See `Policy`."""
        self._queue.push_many(np.asarray(slots, np.int64))

    def removed(self, slot: int, *, evicted: bool) -> None:
        """See `Policy`."""
        self._stamps.one[slot] = 0
        parent = self._chains.removed(slot, evicted=evicted)
        if parent >= 0:
            self._queue.recall(parent)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """See `Policy`."""
        newest = self._stamps.now
        queue, one, is_followed = self._queue, self._stamps.one, self._chains.is_followed
        while (slot := queue.front()) >= 0 and one[slot] <= newest:
            if is_followed(slot):
                queue.skip()
            elif may_go(slot):
                return slot
            else:
                queue.push(slot)
        return self._chains.last_resort(may_go)

    def worst(self, slots: NDArray[np.int64]) -> int:
        """See `Policy`."""
        ends = self._chains.first_to_go(slots)
        return int(ends[self._stamps.of[ends].argmin()])
