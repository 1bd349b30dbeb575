"""The index stays within its bytes, and gives up what is least worth keeping."""

from __future__ import annotations

import gc
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.ports import Hits

HBM, DRAM, STORE = Medium
SMALL = 64 * 150  # 64 block-holders: 8 parked, 4 remembered, 52 held or guessed
ROOM = 52


def prompt(number: int, blocks: int) -> StoredBlocks:
    """A prompt of one token a block, unlike that of any other number."""
    tokens = [1000 * number + at for at in range(blocks)]
    return StoredBlocks([(number << 32 | at) * 0x9E3779B97F4A7C15 % 2**64 for at in range(blocks)], None, tokens, 1)


def keys(stored: StoredBlocks) -> list[int]:
    return block_keys(stored.token_ids, 1, chain_seed())


def small_index() -> KvIndex:
    return KvIndex(max_bytes=SMALL, now=lambda: 0.0)


def reach(index: KvIndex, target: str, number: int, blocks: int) -> int:
    return index.match(keys(prompt(number, blocks)), [target])[0].hbm


def test_the_least_recently_stored_goes_first_and_the_end_of_a_prompt_before_its_beginning():
    index = small_index()
    for number in range(6):
        index.stored("a", HBM, prompt(number, 10))
    assert [reach(index, "a", number, 10) for number in range(6)] == [2, 10, 10, 10, 10, 10]
    assert index.size == ROOM
    assert index.ignored["evicted"] == 8


def test_children_of_blocks_given_up_lately_are_placed():
    index = small_index()
    whole = prompt(0, 60)
    index.stored("a", HBM, whole._replace(hashes=whole.hashes[:52], token_ids=whole.token_ids[:52]))
    index.stored("a", HBM, prompt(1, 1))
    child = whole._replace(hashes=whole.hashes[52:53], token_ids=whole.token_ids[52:53], parent=whole.hashes[51])
    index.stored("a", HBM, child)
    assert (index.ignored["evicted"], index.parked) == (2, 0)


def test_what_requests_asked_for_gets_a_second_chance():
    index = small_index()
    index.stored("a", HBM, prompt(0, 10))
    index.speculate("a", keys(prompt(0, 3)))
    for number in range(1, 6):
        index.stored("a", HBM, prompt(number, 10))
    assert reach(index, "a", 0, 10) == 3


def test_guesses_go_before_what_engines_said():
    index = small_index()
    index.stored("a", HBM, prompt(0, 30))
    index.speculate("a", keys(prompt(1, 12)))
    index.speculate("a", keys(prompt(2, 10)))
    index.stored("a", HBM, prompt(3, 5))
    assert [reach(index, "a", number, 30) for number in range(4)] == [30, 0, 10, 5]


def test_the_target_that_has_most_gives():
    index = small_index()
    index.stored("small", HBM, prompt(0, 10))
    for number in range(1, 10):
        index.stored("large", HBM, prompt(number, 10))
    assert reach(index, "small", 0, 10) == 10
    assert index.size == ROOM


def test_what_is_parked_is_bounded_and_the_oldest_of_whoever_parks_most_goes():
    index = small_index()
    index.join("a", "pool")
    index.store_put("pool", [77])
    for number in range(20):
        index.stored("a", HBM, prompt(number, 2)._replace(parent=number + 1))
    index.stored("a", DRAM, StoredBlocks(range(100, 120)))
    assert 0 < index.parked <= 8
    assert index.ignored["parked_full"] == 20 * 2 + 20 + 1 - index.parked
    index.store_put("pool", range(200, 400))
    assert 0 < index.parked <= 8


stored = st.tuples(st.sampled_from("abc"), st.sampled_from([HBM, DRAM]), st.integers(0, 30), st.integers(1, 12))


class Oldest:
    """Reference: each place a dict in order of storing, last block of a prompt first; the largest gives its oldest."""

    def __init__(self) -> None:
        self.places = {(target, medium): {} for target in "abc" for medium in (HBM, DRAM)}

    def stored(self, target: str, medium: Medium, hashes: list[int]) -> None:
        place = self.places[target, medium]
        for hash_ in reversed(hashes) if medium is HBM else hashes:
            place.setdefault(hash_)
        while sum(map(len, self.places.values())) > ROOM:
            place = max(self.places.values(), key=len)
            del place[next(iter(place))]


@given(steps=st.lists(stored, min_size=15, max_size=60))
@settings(max_examples=150, deadline=None)
def test_eviction_keeps_what_the_reference_keeps(steps):
    index, oldest = small_index(), Oldest()
    for target in "abc":
        index.join(target)
    for target, medium, number, blocks in steps:
        event = prompt(number, blocks)._replace(chunk_blocks=1)
        index.stored(target, medium, event)
        oldest.stored(target, medium, event.hashes)
    for target in "abc":
        assert index.blocks_of(target) == (len(oldest.places[target, HBM]), len(oldest.places[target, DRAM]))
        for number in range(31):
            event = prompt(number, 12)
            held = [hash_ in oldest.places[target, HBM] for hash_ in event.hashes]
            hbm = [*held, False].index(False)
            held = [hash_ in oldest.places[target, DRAM] for hash_ in event.hashes[hbm:]]
            assert index.match(keys(event), [target]) == [Hits(hbm, [*held, False].index(False))]


def test_case_3_a_full_index_costs_no_more_memory_than_it_may_whatever_it_is_full_of():
    most = 1_500_000
    rng = random.Random(5)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = KvIndex(max_bytes=most, now=lambda: 0.0)
        for number in range(1500):
            hashes = [rng.getrandbits(64) for _ in range(16)]
            tokens = [rng.randrange(200_000) for _ in range(256)]
            parent = rng.getrandbits(64) if number % 3 == 2 else None
            index.stored(f"engine {number % 4}", HBM, StoredBlocks(hashes, parent, tokens, 16))
            index.stored(f"engine {number % 4}", DRAM, StoredBlocks([rng.getrandbits(64)]))
            index.speculate("engine 0", [rng.getrandbits(60) for _ in range(16)])
        del hashes, tokens
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used <= most
    assert used * 0.7 < index.nbytes < used * 1.4
    assert index.size > 0.8 * most / 150 * 13 / 16
