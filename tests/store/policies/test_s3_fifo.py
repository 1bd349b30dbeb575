"""S3-FIFO against the lists and dicts of its paper."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvhearth.store.policies.s3_fifo import MOST_USES, S3Fifo

from .models import CHUNK_BYTES, Chunk, Holder


class Reference:
    """Chunks without chains, of one size."""

    def __init__(self, capacity: int) -> None:
        self.limit = capacity * CHUNK_BYTES // 10
        self.small: list[Chunk] = []
        self.main: list[Chunk] = []
        self.ghost: list[Chunk | None] = []
        self.uses: dict[Chunk, int] = {}

    def add(self, chunk: Chunk) -> None:
        self.uses[chunk] = 0
        if chunk in self.ghost:
            self.ghost[self.ghost.index(chunk)] = None
            self.main.append(chunk)
        else:
            self.small.append(chunk)

    def touch(self, chunk: Chunk) -> None:
        self.uses[chunk] = min(self.uses[chunk] + 1, MOST_USES)

    def evict(self) -> Chunk:
        while True:
            if self.small and (len(self.small) * CHUNK_BYTES >= self.limit or not self.main):
                chunk = self.small.pop(0)
                if self.uses[chunk] <= 1:
                    held = len(self.small) + len(self.main) + 1
                    self.ghost = [*self.ghost, chunk][-held:]
                    return chunk
                self.uses[chunk] = 0
                self.main.append(chunk)
                continue
            chunk = self.main.pop(0)
            if not self.uses[chunk]:
                return chunk
            self.uses[chunk] -= 1
            self.main.append(chunk)


@settings(max_examples=80, deadline=None)
@example(capacity=11, events=[(chain, 2) for chain in (0, 1, 4, 5, 6, 7, 8, 9, 10, 11)] + [(2, 0), (3, 0)])
@given(
    capacity=st.integers(1, 40),
    events=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=150),
)
def test_it_evicts_what_the_reference_evicts(capacity: int, events: list[tuple[int, int]]) -> None:
    store, reference = Holder(capacity, S3Fifo), Reference(capacity)
    for chain, uses in events:
        chunk = Chunk(chain, 0)
        if chunk not in store.slot_of:
            if not store.free:
                assert store.evict() == reference.evict()
            store.add(chunk)
            reference.add(chunk)
        for _ in range(uses):
            store.touch([chunk])
            reference.touch(chunk)


def test_a_flood_of_prompts_that_come_once_leaves_what_was_used_twice() -> None:
    store = Holder(100, S3Fifo)
    loved = [Chunk(chain, 0) for chain in range(50)]
    for chunk in loved:
        store.put(chunk)
        store.touch([chunk])
        store.touch([chunk])
    for chain in range(100, 400):
        store.put(Chunk(chain, 0))
    assert all(chunk in store.slot_of for chunk in loved)
