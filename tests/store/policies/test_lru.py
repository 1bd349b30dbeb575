"""Least recently used goes first, but for what others follow."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.policies.lru import Lru

from .models import Chunk, Holder

chunks = st.builds(Chunk, st.integers(0, 4), st.integers(0, 3))


@settings(max_examples=80, deadline=None)
@given(events=st.lists(st.tuples(st.sampled_from(["use", "delete", "evict"]), chunks), max_size=80))
def test_it_is_an_ordered_dict_in_which_followed_chunks_are_passed_over(events: list[tuple[str, Chunk]]) -> None:
    store = Holder(64, lambda facts, _: Lru(facts))
    order: OrderedDict[Chunk, None] = OrderedDict()
    evicted: set[Chunk] = set()
    for what, chunk in events:
        if what == "use" and chunk in order:
            store.touch([chunk])
            order.move_to_end(chunk)
        elif what == "use":
            store.add(chunk)
            order[chunk] = None
            if chunk.position and Chunk(chunk.chain, chunk.position - 1) in evicted - set(order):
                order.move_to_end(chunk, last=False)
        elif what == "delete" and chunk in order:
            store.remove(chunk)
            del order[chunk]
        elif what == "evict" and order:
            expected = next(chunk for chunk in order if not store.is_followed(chunk))
            assert store.evict() == expected
            del order[expected]
            evicted.add(expected)


def test_what_may_not_go_counts_as_just_used() -> None:
    store = Holder(3, lambda facts, _: Lru(facts))
    for chain in range(3):
        store.put(Chunk(chain, 0))
    assert store.victim(pinned=[Chunk(0, 0)]) == Chunk(1, 0)
    assert [store.evict().chain for _ in range(3)] == [1, 2, 0]
