"""The simulated store and links do what the real ones would, at the times that the cost model says."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel
from kvhearth.engine.links import modelled_links
from kvhearth.engine.ports import Job, JobDone, JobKind
from kvhearth.planner.virtual import VirtualStore, VirtualTransfers

COST = CostModel("llama-3.1-8b", "h100-sxm")
CHUNK = COST.kv_bytes(16)


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))),
)
def test_the_store_keeps_what_was_used_last(capacity: int, calls: list[tuple[bool, list[int]]]) -> None:
    store, held = VirtualStore(capacity), OrderedDict[int, None]()
    for is_put, keys in calls:
        if is_put:
            store.put(keys)
            for key in keys:
                held.pop(key, None)
                held[key] = None
            while len(held) > capacity:
                held.popitem(last=False)
        else:
            expected = 0
            while expected < len(keys) and keys[expected] in held:
                held.move_to_end(keys[expected])
                expected += 1
            assert store.leading(keys) == expected
        assert len(store) == len(held)


def test_transfers_end_when_the_links_say_and_a_put_is_seen_only_then() -> None:
    links, store = modelled_links(COST, "ethernet-100g", CHUNK), VirtualStore(10)
    port = VirtualTransfers(links, store)
    port.start(Job(1, JobKind.PUT, (5, 6), 2 * CHUNK))
    ends = port.next_ns()
    assert ends is not None
    assert ends > COST.transfer_ns(2 * CHUNK, "ethernet-100g", 2 * CHUNK) // 2
    port.now_ns = ends - 1
    assert port.finished() == []
    assert len(store) == 0
    port.now_ns = ends
    assert port.finished() == [JobDone(1, 2)]
    assert len(store) == 2


def test_a_fetch_of_what_was_evicted_meanwhile_comes_short() -> None:
    store = VirtualStore(10)
    port = VirtualTransfers(modelled_links(COST, "ethernet-100g", CHUNK), store)
    store.put([5, 6])
    port.start(Job(1, JobKind.FETCH, (5, 6, 7), 3 * CHUNK))
    port.now_ns = port.next_ns() or 0
    assert port.finished() == [JobDone(1, 2)]


def test_a_lookup_is_answered_after_the_round_trip_and_once() -> None:
    store = VirtualStore(10)
    port = VirtualTransfers(modelled_links(COST, "ethernet-100g", CHUNK), store)
    assert port.lookup("r", [1, 2]) is None
    store.put([1])
    assert port.lookup("r", [1, 2]) is None
    port.now_ns = port.next_ns() or 0
    assert port.lookup("r", [1, 2]) == 1
    store.put([2])
    assert port.lookup("r", [1, 2]) == 1
    port.forget("r")
    assert port.lookup("r", [1, 2]) is None
