"""What an eviction policy would have hit on a recorded workload, beside what nobody can do better (Belady). Plays
policies without a store: chunks of one size, requests one after another.

A request looks up the chunks of its prompt in order; those before the first that is not held are hits and are touched,
tail first. Then what is not held is put, head first.
"""

from __future__ import annotations

import heapq
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvhearth.errors import UserError
from kvhearth.store.policies import make_policy
from kvhearth.store.policies.facts import Facts

BELADY = "belady"
"""Not a policy: the chunk whose next use is farthest goes first (L. A. Belady, IBM Systems Journal 5(2), 1966)."""

_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class ChunkTrace:
    """Requests as numbers of chunks, which count from 0 in the order of their first use.

    Attributes:
        chunks: int32, the prompts' chunks, one request after another.
        ends: int64, shape (requests,), where each request ends in ``chunks``.
        fingerprints: uint64, shape (distinct chunks,).
        parents: uint64, shape (distinct chunks,), fingerprint of the chunk before each one; 0 for a head.
        positions: uint32, shape (distinct chunks,), place of each in its chain.
        chunk_bytes: bytes of any chunk.
    """

    chunks: NDArray[np.int32]
    ends: NDArray[np.int64]
    fingerprints: NDArray[np.uint64]
    parents: NDArray[np.uint64]
    positions: NDArray[np.uint32]
    chunk_bytes: int

    @classmethod
    def of(cls, requests: Iterable[Sequence[int]], chunk_bytes: int) -> ChunkTrace:
        """Read requests, each the fingerprints (well mixed, 1 … 2**64 - 1) of its prompt's chunks in order.

        A chunk's fingerprint stands for all that precedes it too, as vLLM's block hashes do: a chunk has one place.

        Raises:
            UserError: no chunk in any request.
        """
        numbers: dict[int, int] = {}
        chunks: list[int] = []
        ends: list[int] = []
        parents: list[int] = []
        positions: list[int] = []
        for request in requests:
            parent = 0
            for position, fingerprint in enumerate(request):
                number = numbers.setdefault(fingerprint, len(numbers))
                if number == len(parents):
                    parents.append(parent)
                    positions.append(position)
                chunks.append(number)
                parent = fingerprint
            ends.append(len(chunks))
        if not chunks:
            raise UserError("no prompt fills a chunk", where="trace", remedy="give one with longer prompts")
        return cls(
            np.array(chunks, np.int32),
            np.array(ends, np.int64),
            np.array(list(numbers), np.uint64),
            np.array(parents, np.uint64),
            np.array(positions, np.uint32),
            chunk_bytes,
        )

    @property
    def lookups(self) -> int:
        """Chunks that the requests look up, counting repeats."""
        return len(self.chunks)

    @property
    def distinct(self) -> int:
        """The working set, in chunks."""
        return len(self.fingerprints)

    def requests(self) -> list[list[int]]:
        """The chunk numbers of each request."""
        return [part.tolist() for part in np.split(self.chunks, self.ends[:-1])]


class HitRate(NamedTuple):
    """One policy at one capacity: ``hits`` of the trace's ``lookups``, both in chunks."""

    policy: str
    capacity_chunks: int
    hits: int
    lookups: int

    @property
    def share(self) -> float:
        """Hits as a share of lookups."""
        return self.hits / self.lookups


def play(trace: ChunkTrace, policy: str, capacity_chunks: int) -> HitRate:
    """Hits of one policy, or of `BELADY`, in a store that holds ``capacity_chunks`` (≥ 1).

    Raises:
        UserError: no policy of that name.
    """
    hits = _belady_hits(trace, capacity_chunks) if policy == BELADY else _policy_hits(trace, policy, capacity_chunks)
    return HitRate(policy, capacity_chunks, hits, trace.lookups)


def play_all(
    trace: ChunkTrace,
    policies: Sequence[str],
    capacities_chunks: Sequence[int],
    *,
    processes: int = 1,
    on_done: Callable[[], None] = lambda: None,
) -> list[HitRate]:
    """Every policy at every capacity, policy by policy; the same whatever ``processes`` is.

    Args:
        processes: how many to share the work between; 1 does it here.
        on_done: called after each one of the ``len(policies) * len(capacities_chunks)``.
    """
    pairs = [(policy, capacity) for policy in policies for capacity in capacities_chunks]
    rates: dict[tuple[str, int], HitRate] = {}
    if processes == 1:
        for pair in pairs:
            rates[pair] = play(trace, *pair)
            on_done()
        return [rates[pair] for pair in pairs]
    # Spawned, since the caller may have threads (a progress bar), which a fork would leave in a broken state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _set_trace, (trace,)) as pool:
        for done in as_completed([pool.submit(_play_here, *pair) for pair in pairs]):
            rate = done.result()
            rates[rate.policy, rate.capacity_chunks] = rate
            on_done()
    return [rates[pair] for pair in pairs]


_trace: ChunkTrace


def _set_trace(trace: ChunkTrace) -> None:
    global _trace  # noqa: PLW0603 - what a worker process is given once, not with each task
    _trace = trace


def _play_here(policy: str, capacity_chunks: int) -> HitRate:
    return play(_trace, policy, capacity_chunks)


def _policy_hits(trace: ChunkTrace, name: str, capacity_chunks: int) -> int:
    capacity = min(capacity_chunks, trace.distinct)
    facts = Facts(capacity)
    policy = make_policy(name, facts, capacity * trace.chunk_bytes)
    fingerprints, parents, positions = trace.fingerprints.tolist(), trace.parents.tolist(), trace.positions.tolist()
    slot_of = [-1] * trace.distinct
    chunk_in = [-1] * capacity
    free = list(range(capacity - 1, -1, -1))
    facts.nbytes[:] = trace.chunk_bytes
    column_fingerprint, column_parent = facts.fingerprint.data, facts.parent.data
    column_position = facts.position.data
    hits = 0
    for request in trace.requests():
        touched = list(takewhile((-1).__ne__, map(slot_of.__getitem__, request)))
        if touched:
            hits += len(touched)
            policy.touched(touched[::-1])
        for chunk in request[len(touched) :]:
            if slot_of[chunk] >= 0:
                continue
            if not free:
                slot = policy.victim(_any)
                if slot is None:
                    raise RuntimeError(f"{name} names none of {capacity} chunks that may all go")
                policy.removed(slot, evicted=True)
                slot_of[chunk_in[slot]] = -1
                free.append(slot)
            slot = free.pop()
            slot_of[chunk], chunk_in[slot] = slot, chunk
            column_fingerprint[slot], column_parent[slot] = fingerprints[chunk], parents[chunk]
            column_position[slot] = positions[chunk]
            policy.added(slot)
    return hits


def _any(_slot: int) -> bool:
    return True


def _belady_hits(trace: ChunkTrace, capacity_chunks: int) -> int:
    # A chunk is used whenever one that follows it is, so the farthest next use never parts a tail from its head, and
    # what this holds hits as a leading run: the bound holds for hits that count only behind hits.
    requests = trace.requests()
    next_uses = _next_uses(requests, trace.distinct)
    positions = trace.positions.tolist()
    held: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -position, chunk); places of the past are skipped
    hits = 0
    for request, uses in zip(requests, next_uses, strict=True):
        hits += sum(1 for _ in takewhile(held.__contains__, request))
        for chunk, use in zip(request, uses, strict=True):
            entry = -use, -positions[chunk], chunk
            if chunk not in held and len(held) >= capacity_chunks:
                while held.get(farthest[0][2]) != -farthest[0][0]:
                    heapq.heappop(farthest)
                if entry < farthest[0]:  # itself would be the one to go
                    continue
                del held[heapq.heappop(farthest)[2]]
            held[chunk] = use
            heapq.heappush(farthest, entry)
    return hits


def _next_uses(requests: list[list[int]], distinct: int) -> list[list[int]]:
    """For each chunk of each request, the number of the next request that has it."""
    following = [_NEVER] * distinct
    next_uses = []
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        next_uses.append([following[chunk] for chunk in request])
        for chunk in request:
            following[chunk] = number
    return next_uses[::-1]
