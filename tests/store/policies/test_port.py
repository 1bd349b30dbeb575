"""What holds for every policy, whatever is put, used, deleted and pinned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.store.policies import DEFAULT_POLICY, POLICY_NAMES, make_policy
from kvhearth.store.policies.facts import Facts

from .models import Chunk, Holder

every_policy = pytest.mark.parametrize("name", POLICY_NAMES)
chunks = st.builds(Chunk, st.integers(0, 3), st.integers(0, 4))
events = st.lists(
    st.tuples(st.sampled_from(["put", "request", "delete", "pinned"]), chunks, st.sets(chunks)), max_size=40
)


def holder(name: str, capacity: int) -> Holder:
    return Holder(capacity, lambda facts, nbytes: make_policy(name, facts, nbytes))


@every_policy
@settings(max_examples=40, deadline=None)
@given(events=events, capacity=st.integers(1, 8))
def test_the_victim_is_held_and_may_go_and_there_is_one_whenever_any_may(
    name: str, events: list[tuple[str, Chunk, set[Chunk]]], capacity: int
) -> None:
    store = holder(name, capacity)
    for what, chunk, pinned in events:
        if what == "put" and chunk not in store.slot_of:
            store.put(chunk)
        elif what == "request":
            store.request(chunk.chain, chunk.position + 1)
        elif what == "delete" and chunk in store.slot_of:
            store.remove(chunk)
        victim = store.victim(pinned)  # KeyError if it, or what was asked about, is not held
        free_to_go = set(store.slot_of) - pinned
        assert (victim is not None) == bool(free_to_go)
        if victim is not None:
            assert victim in free_to_go
            if any(not store.is_followed(other) for other in free_to_go):
                assert not store.is_followed(victim)


@every_policy
@settings(max_examples=30, deadline=None)
@given(events=events, capacity=st.integers(2, 12))
def test_a_head_outlives_its_tail(name: str, events: list[tuple[str, Chunk, set[Chunk]]], capacity: int) -> None:
    store = holder(name, capacity)
    for _, chunk, _ in events:
        store.request(chunk.chain, min(chunk.position + 1, capacity - 1))
    while store.slot_of:
        victim = store.victim()
        assert victim is not None
        assert not store.is_followed(victim)
        store.remove(victim, evicted=True)


@every_policy
def test_the_order_in_which_two_prompts_are_put_at_once_parts_no_chain(name: str) -> None:
    store = holder(name, 20)
    for position in range(10):
        store.put(Chunk(0, position))
        store.put(Chunk(1, position))
    gone = [store.evict() for _ in range(20)]
    for chain in (0, 1):
        assert [chunk.position for chunk in gone if chunk.chain == chain] == list(range(9, -1, -1))


@every_policy
def test_a_child_that_came_before_its_parent_goes_before_it(name: str) -> None:
    store = holder(name, 3)
    for position in (2, 0, 1):
        store.put(Chunk(0, position))
    assert [store.evict().position for _ in range(3)] == [2, 1, 0]


@every_policy
def test_made_up_parents_keep_nothing_for_ever(name: str) -> None:
    store = holder(name, 4)
    facts = store.facts
    for slot, (position, parent) in enumerate([(1, 12), (2, 11), (1, 13), (1, 14)]):
        facts.position[slot], facts.parent[slot], facts.fingerprint[slot] = position, parent, 11 + slot
        facts.nbytes[slot] = 100
        store.chunk_in[slot] = Chunk(9, slot)
        store.policy.added(slot)
    gone = set()
    for _ in range(4):
        slot = store.policy.victim(lambda _: True)
        assert slot is not None
        gone.add(slot)
        store.policy.removed(slot, evicted=True)
    assert gone == {0, 1, 2, 3}
    assert store.policy.victim(lambda _: True) is None


@every_policy
def test_a_prompt_longer_than_the_store_keeps_its_beginning(name: str) -> None:
    store = holder(name, 10)
    store.request(0, 50)
    assert store.request(0, 50) >= 8


@every_policy
def test_the_same_calls_give_the_same_victims(name: str) -> None:
    def play() -> list[Chunk]:
        store = holder(name, 30)
        rng = np.random.default_rng(5)
        gone = []
        for _ in range(200):
            if len(store.slot_of) > 25:
                gone += [store.evict() for _ in range(5)]
            store.request(int(rng.integers(20)), int(rng.integers(1, 8)))
        return gone

    assert play() == play()


@every_policy
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_worst_of_some_is_one_of_them_and_a_tail_where_there_is_one(name: str, data: st.DataObject) -> None:
    store = holder(name, 12)
    for chain, length in data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1)):
        store.request(chain, length)
    some = data.draw(st.lists(st.sampled_from(sorted(store.slot_of)), min_size=1, unique=True))
    worst = store.chunk_in[store.policy.worst(np.array([store.slot_of[chunk] for chunk in some]))]
    assert worst in some
    if any(not store.is_followed(chunk) for chunk in some):
        assert not store.is_followed(worst)
    else:
        assert worst.position == max(chunk.position for chunk in some)


@every_policy
def test_the_worst_of_all_heads_that_were_never_used_again_is_the_oldest(name: str) -> None:
    store = holder(name, 8)
    for chain in range(8):
        store.put(Chunk(chain, 0))
    store.touch([Chunk(0, 0)])
    slots = np.array([store.slot_of[Chunk(chain, 0)] for chain in (5, 0, 3, 1)])
    assert store.chunk_in[store.policy.worst(slots)] == Chunk(1, 0)


def test_the_default_is_one_of_the_names_and_another_name_is_refused() -> None:
    assert DEFAULT_POLICY in POLICY_NAMES
    with pytest.raises(UserError, match="there is no policy 'mru'; use one of"):
        make_policy("mru", Facts(1), 1)
