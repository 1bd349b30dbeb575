"""The default policy: what it learns, what it spares, and that it is recency where nothing else is known."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.policies.kv_aware import KvAware
from kvhearth.store.policies.lru import Lru

from .models import Chunk, Holder

chunks = st.builds(Chunk, st.integers(0, 6), st.integers(0, 3))


def aware(capacity: int) -> Holder:
    return Holder(capacity, lambda facts, _: KvAware(facts))


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 12), st.lists(st.tuples(st.sampled_from(["request", "delete"]), chunks), max_size=60))
def test_before_it_has_learned_it_is_plain_recency(capacity: int, events: list[tuple[str, Chunk]]) -> None:
    stores = aware(capacity), Holder(capacity, lambda facts, _: Lru(facts))
    for what, chunk in events:
        for store in stores:
            if what == "request":
                store.request(chunk.chain, chunk.position + 1)
            elif chunk in store.slot_of:
                store.remove(chunk)
        assert stores[0].slot_of.keys() == stores[1].slot_of.keys()


def test_a_flood_that_does_not_come_back_leaves_what_does() -> None:
    def hits(store: Holder) -> int:
        found = 0
        for number in range(14):
            found += sum(store.request(chain, 1) for chain in range(800))
            for chain in range(900):
                store.request(10_000 + 900 * number + chain, 1)
        return found

    assert hits(Holder(1100, lambda facts, _: Lru(facts))) == 0
    assert hits(aware(1100)) > 1_000


def test_what_is_dear_to_compute_again_stays_longer_and_what_is_cheap_goes_sooner() -> None:
    store = aware(40)
    for chain in range(20):
        store.put(Chunk(chain, 0), recompute_ns=1_000_000)
    store.put(Chunk(20, 0), recompute_ns=20_000_000)
    store.put(Chunk(21, 0), recompute_ns=10_000)
    for chain in range(22, 40):
        store.put(Chunk(chain, 0), recompute_ns=1_000_000)
    gone = [store.evict().chain for _ in range(40)]
    assert gone.index(21) < gone.index(5)
    assert gone.index(20) > gone.index(25)
