"""What the tests of policies share: a small store of chains, and the plainest statement of each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.port import Policy

CHUNK_BYTES = 100


class Chunk(NamedTuple):
    """A chunk of chain ``chain``: equal chunks have equal fingerprints."""

    chain: int
    position: int

    @property
    def fingerprint(self) -> int:
        return hash((self.chain, self.position, 77)) & (2**64 - 1) or 1

    @property
    def parent(self) -> int:
        return Chunk(self.chain, self.position - 1).fingerprint if self.position else 0


class Holder:
    """The owner of a policy: which chunk is in which slot."""

    def __init__(self, capacity: int, make: Callable[[Facts, int], Policy]) -> None:
        self.facts = Facts(capacity)
        self.policy = make(self.facts, capacity * CHUNK_BYTES)
        self.slot_of: dict[Chunk, int] = {}
        self.chunk_in: dict[int, Chunk] = {}
        self.free = list(range(capacity - 1, -1, -1))

    def add(self, chunk: Chunk, recompute_ns: int = 0) -> int:
        slot = self.free.pop()
        facts = self.facts
        facts.nbytes[slot], facts.position[slot] = CHUNK_BYTES, chunk.position
        facts.parent[slot], facts.fingerprint[slot] = chunk.parent, chunk.fingerprint
        facts.recompute_ns[slot] = recompute_ns
        self.slot_of[chunk], self.chunk_in[slot] = slot, chunk
        self.policy.added(slot)
        return slot

    def touch(self, chunks: Iterable[Chunk]) -> None:
        self.policy.touched([self.slot_of[chunk] for chunk in chunks])

    def remove(self, chunk: Chunk, *, evicted: bool = False) -> None:
        slot = self.slot_of.pop(chunk)
        del self.chunk_in[slot]
        self.policy.removed(slot, evicted=evicted)
        self.free.append(slot)

    def victim(self, pinned: Iterable[Chunk] = ()) -> Chunk | None:
        spared = set(pinned)
        slot = self.policy.victim(lambda slot: self.chunk_in[slot] not in spared)
        return None if slot is None else self.chunk_in[slot]

    def evict(self) -> Chunk:
        chunk = self.victim()
        assert chunk is not None
        self.remove(chunk, evicted=True)
        return chunk

    def is_followed(self, chunk: Chunk) -> bool:
        return Chunk(chunk.chain, chunk.position + 1) in self.slot_of

    def put(self, chunk: Chunk, recompute_ns: int = 0) -> None:
        """As a store does: room is made when there is none."""
        if not self.free:
            self.evict()
        self.add(chunk, recompute_ns)

    def request(self, chain: int, length: int) -> int:
        """Look up a prompt, put what is missing; how many chunks hit."""
        prompt = [Chunk(chain, position) for position in range(length)]
        hits = next((n for n, chunk in enumerate(prompt) if chunk not in self.slot_of), length)
        self.touch(reversed(prompt[:hits]))
        for chunk in prompt[hits:]:
            if chunk not in self.slot_of:
                self.put(chunk)
        return hits
