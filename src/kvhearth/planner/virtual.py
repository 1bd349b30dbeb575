"""A store and an engine's transfers in virtual time: modelled, and driven by whoever simulates. No clock, no bytes."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count

from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import Job, JobDone, JobKind


class VirtualStore:
    """Which chunks the shared store holds: least recently used out first."""

    def __init__(self, capacity_chunks: int) -> None:
        self.on_evicted: Callable[[Sequence[int]], None] | None = None
        self._capacity = capacity_chunks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[int]) -> int:
        """How many leading keys are present; touches them."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
            self._keys.move_to_end(key)
        return len(keys)

    def leading_held(self, keys: Sequence[int]) -> int:
        """How many leading keys are present, without counting as a use."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
        return len(keys)

    def put(self, keys: Sequence[int]) -> None:
        """Add chunks, evicting the oldest."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        evicted = [self._keys.popitem(last=False)[0] for _ in range(len(self._keys) - self._capacity)]
        if evicted and self.on_evicted:
            self.on_evicted(evicted)


class VirtualTransfers:
    """The engine's port in virtual time; its driver sets ``now_ns`` before each step."""

    def __init__(self, links: ModelledLinks, store: VirtualStore) -> None:
        self.now_ns = 0
        self._links = links
        self._store = store
        self._order = count()
        self._jobs: list[tuple[int, int, Job]] = []
        self._loads_from_ns = 0
        self._lookups: dict[str, dict[tuple[int, ...], int]] = {}
        self._answers: dict[str, dict[tuple[int, ...], int]] = {}

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        """See `engine.ports.Transfers`; the store is asked when the modelled round trip is over."""
        wanted = tuple(keys)
        answers = self._answers.setdefault(request_id, {})
        if wanted in answers:
            return answers[wanted]
        ready_ns = self._lookups.setdefault(request_id, {}).setdefault(wanted, self._links.lookup_ns(self.now_ns))
        if ready_ns > self.now_ns:
            return None
        del self._lookups[request_id][wanted]
        answers[wanted] = self._store.leading(wanted)
        return answers[wanted]

    def start(self, job: Job) -> None:
        """See `engine.ports.Transfers`."""
        from_ns = max(self.now_ns, self._loads_from_ns) if job.kind is JobKind.LOAD else self.now_ns
        heapq.heappush(self._jobs, (self._links.done_ns(from_ns, job), next(self._order), job))

    def flush(self, job_ids: Sequence[int]) -> int:
        """See `engine.ports.Transfers`."""
        ends_ns = [done_ns for done_ns, _, job in self._jobs if job.job_id in job_ids]
        self._loads_from_ns = max(ends_ns, default=self.now_ns)
        return max(0, self._loads_from_ns - self.now_ns)

    def finished(self) -> list[JobDone]:
        """See `engine.ports.Transfers`. A put becomes visible, and a fetch is checked, when it ends."""
        done = []
        while self._jobs and self._jobs[0][0] <= self.now_ns:
            job = heapq.heappop(self._jobs)[2]
            arrived = len(job.keys)
            if job.kind is JobKind.PUT:
                self._store.put(job.keys)
            elif job.kind is JobKind.FETCH:
                arrived = self._store.leading(job.keys)
            done.append(JobDone(job.job_id, arrived))
        return done

    def forget(self, request_id: str) -> None:
        """See `engine.ports.Transfers`."""
        self._lookups.pop(request_id, None)
        self._answers.pop(request_id, None)

    def next_ns(self) -> int | None:
        """When the port will next have news, or None. Answers that are there and not yet taken are no news."""
        times = [ready for lookups in self._lookups.values() for ready in lookups.values() if ready > self.now_ns]
        if self._jobs:
            times.append(self._jobs[0][0])
        return min(times, default=None)
