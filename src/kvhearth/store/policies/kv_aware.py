"""The policy made for KV chunks: recency that knows what was used before, what is dear to compute again, and which
chunk follows which.

Each chunk has an age, the uses of any chunk since its own last one. The age of a chunk that was never used again
counts ``patience`` times: 1 is plain recency, and a large patience keeps what has proved itself through a flood of
prompts that do not come back. Which patience is best depends on capacity and workload, so it is learned (`trials`).
The age of a chunk whose computing again would take over twice the mean time per byte counts half, under half of it
twice. The victim is the oldest by that measure of the chunks that no held chunk follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvhearth.store.policies.chains import Chains
from kvhearth.store.policies.costs import CHEAP, COSTS, DEAR, Costs
from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.ghost import Ghost
from kvhearth.store.policies.queue import SlotQueue, Stamps
from kvhearth.store.policies.trials import Trials

_WATCHED_BIT = 40
"""Bits of the fingerprint from here on choose the watched chunks; those below place them in tables."""

_PENDING_AT_MOST = 1024
_PLAYED_AT_ONCE = 16
_AGE_FACTOR = {CHEAP: 2.0, DEAR: 0.5}


class KvAware:
    """A queue for each cost class of what is new, and of what was used again or had been here before.

    A slot that may not go when its turn comes counts as just used.
    """

    def __init__(self, facts: Facts) -> None:
        self._chains = Chains(facts)
        self._costs = Costs(facts)
        self._stamps = Stamps(facts.capacity)
        self._queues = [SlotQueue(self._stamps) for _ in range(2 * COSTS)]  # new ones by cost, then proven ones
        self._homes: NDArray[np.uint8] = np.zeros(facts.capacity, np.uint8)  # number of the queue of each slot
        self._home = self._homes.data
        self._fingerprints = facts.fingerprint
        self._fingerprint = facts.fingerprint.data
        self._gone = Ghost(facts.capacity)
        self._held = 0
        self._trials = Trials()
        self._trying = False  # from the first eviction on: before, there is nothing to choose
        self._watched_mask = 0
        self._pending: list[int] = []
        self._set_factors()

    def added(self, slot: int) -> None:
        """See `Policy`."""
        useless = self._chains.added(slot)
        self._held += 1
        cost = self._costs.class_of(slot)
        fingerprint = self._fingerprint[slot]
        proven = self._gone.take(fingerprint)
        self._home[slot] = home = COSTS + cost if proven else cost
        if useless:
            self._queues[home].push_front(slot)
        else:
            self._queues[home].push(slot)
        if self._trying:
            if not (fingerprint >> _WATCHED_BIT) & self._watched_mask:
                self._pending.append(fingerprint)
            if self._pending:
                self._try(_PLAYED_AT_ONCE)

    def touched(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """See `Policy`."""
        if len(slots) == 1:
            self._touched_one(int(slots[0]))
            return
        index = np.asarray(slots, np.int64)
        stamps = self._stamps.next_many(index)
        homes = self._homes[index]
        homes += (homes < COSTS) * np.uint8(COSTS)
        self._homes[index] = homes
        first = int(homes[0]) if len(homes) else 0
        if (homes == first).all():
            self._queues[first].push_stamped(index, stamps)
        else:
            for home in range(COSTS, 2 * COSTS):
                there = homes == home
                self._queues[home].push_stamped(index[there], stamps[there])
        if self._trying:
            seen = self._fingerprints[index]
            watched = seen[(seen >> np.uint64(_WATCHED_BIT)) & np.uint64(self._watched_mask) == 0]
            self._pending += watched.tolist()
            if len(self._pending) > _PENDING_AT_MOST:
                self._try(len(self._pending) - _PENDING_AT_MOST)

    def _touched_one(self, slot: int) -> None:
        home = self._home[slot]
        if home < COSTS:
            self._home[slot] = home = home + COSTS
        self._queues[home].push(slot)
        if self._trying and not (fingerprint := self._fingerprint[slot]) >> _WATCHED_BIT & self._watched_mask:
            self._pending.append(fingerprint)
            if len(self._pending) > _PENDING_AT_MOST:
                self._try(len(self._pending) - _PENDING_AT_MOST)

    def removed(self, slot: int, *, evicted: bool) -> None:
        """See `Policy`."""
        self._stamps.one[slot] = 0
        if evicted:
            self._gone.add(self._fingerprint[slot], self._held)
        self._held -= 1
        parent = self._chains.removed(slot, evicted=evicted)
        if parent >= 0:
            self._queues[self._home[parent]].recall(parent)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        """See `Policy`."""
        if not self._trying and self._held:
            self._trying = True
            self._resize()
        newest = self._stamps.now
        while True:
            home, slot = self._oldest(newest)
            if slot < 0:
                return self._chains.last_resort(may_go)
            if may_go(slot):
                return slot
            self._queues[home].push(slot)

    def worst(self, slots: NDArray[np.int64]) -> int:
        """See `Policy`."""
        ends = self._chains.first_to_go(slots)
        ages = (self._stamps.now + 1 - self._stamps.of[ends]) * np.array(self._factors)[self._homes[ends]]
        return int(ends[ages.argmax()])

    def _oldest(self, newest: int) -> tuple[int, int]:
        """Queue and slot of the oldest by its counted age that nothing follows, stamped by ``newest``; -1 for none."""
        best, found, found_home = -1.0, -1, -1
        now, one, is_followed = self._stamps.now + 1, self._stamps.one, self._chains.is_followed
        for home, queue in enumerate(self._queues):
            if queue.is_empty:
                continue
            while (slot := queue.front()) >= 0 and is_followed(slot):
                queue.skip()
            if slot >= 0 and (stamp := one[slot]) <= newest:
                age = (now - stamp) * self._factors[home]
                if age > best:
                    best, found, found_home = age, slot, home
        return found_home, found

    def _set_factors(self) -> None:
        by_cost = [_AGE_FACTOR.get(cost, 1.0) for cost in range(COSTS)]
        self._factors = [factor * self._trials.patience for factor in by_cost] + by_cost

    def _try(self, count: int) -> None:
        fingerprints, self._pending = self._pending[:count], self._pending[count:]
        if self._trials.used(fingerprints):
            self._resize()

    def _resize(self) -> None:
        self._watched_mask = (1 << self._trials.resize(self._held)) - 1
        self._set_factors()
