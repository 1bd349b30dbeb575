"""What the index makes of events as vLLM's engines and the store really send them."""

from __future__ import annotations

import pytest
from xxhash import xxh3_64_intdigest

from kvhearth.errors import UserError
from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.ports import Hits

HBM, DRAM, STORE = Medium
BLOCK = 4
TOKENS = list(range(100, 164))  # 16 blocks


def hashes(tokens: list[int] = TOKENS, lora: str = "", salt: str = "", seed: str = "") -> list[int]:
    """Stands for vLLM's hashes: an engine's own, chained, of 64 bits."""
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    return [xxh3_64_intdigest(f"{seed}|{lora}|{salt}|{tokens[:end]}".encode()) for end in ends]


def run(first: int = 0, last: int = 16, **kinds: str) -> StoredBlocks:
    """Blocks first..last of TOKENS as a ``BlockStored`` event tells them."""
    of_prompt = hashes(**kinds)
    naming = {name: value for name, value in kinds.items() if name != "seed"}
    tokens = TOKENS[first * BLOCK : last * BLOCK]
    return StoredBlocks(of_prompt[first:last], of_prompt[first - 1] if first else None, tokens, BLOCK, **naming)


def keys(lora: str = "", salt: str = "") -> list[int]:
    return block_keys(TOKENS, BLOCK, chain_seed(lora, salt))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock) -> KvIndex:
    return KvIndex(max_bytes=1 << 22, now=clock)


def hits(index: KvIndex, target: str = "a", of: list[int] | None = None) -> Hits:
    return index.match(keys() if of is None else of, [target])[0]


def test_a_prompt_reaches_as_far_as_each_target_holds_it(index):
    index.stored("a", HBM, run(0, 16))
    index.stored("b", HBM, run(0, 5))
    index.stored("b", HBM, run(5, 7))
    assert index.match(keys(), ["b", "nobody", "a"]) == [Hits(7), Hits(), Hits(16)]
    assert index.match(keys()[:3], ["b", "a"]) == [Hits(3), Hits(3)]
    assert index.match([], ["a"]) == [Hits()]


def test_a_gap_ends_a_prefix(index):
    index.stored("a", HBM, run())
    index.removed("a", HBM, [hashes()[6]])
    assert hits(index) == Hits(6)
    index.stored("a", HBM, run(6, 7))
    assert hits(index) == Hits(16)


def test_any_number_of_targets_hold_a_block(index):
    names = [f"engine {number}" for number in range(300)]
    for at, name in enumerate(names):
        index.stored(name, HBM, run(0, 1 + at % 16))
    assert index.match(keys(), names) == [Hits(1 + at % 16) for at in range(300)]
    for name in names[::2]:
        index.leave(name)
    assert index.match(keys(), names) == [Hits(1 + at % 16 if at % 2 else 0) for at in range(300)]


@pytest.mark.parametrize("times", [1, 2, 3])
def test_events_that_come_twice_do_no_harm(index, times):
    for _ in range(times):
        index.stored("a", HBM, run())
    assert index.size == 16
    for _ in range(times):
        index.removed("a", HBM, hashes()[8:])
    assert (hits(index), index.size) == (Hits(8), 8)


def test_case_14_children_that_come_before_their_parents_wait_for_them(index):
    index.stored("a", HBM, run(8, 12))
    index.stored("a", HBM, run(12, 16))
    index.stored("a", HBM, run(4, 8))
    assert (hits(index), index.parked) == (Hits(), 12)
    index.stored("a", HBM, run(0, 4))
    assert (hits(index), index.parked) == (Hits(16), 0)


def test_what_was_removed_while_its_parent_was_unknown_stays_removed(index):
    index.stored("a", HBM, run(8, 16))
    index.removed("a", HBM, hashes()[10:12])
    index.stored("a", HBM, run(0, 8))
    assert hits(index) == Hits(10)
    index.stored("a", HBM, run(11, 12))
    assert (hits(index), index.parked) == (Hits(10), 0), "its parent is known though it was gone when it got known"
    index.stored("a", HBM, run(10, 11))
    assert hits(index) == Hits(16)


def test_an_engine_that_restarts_or_clears_its_cache_holds_nothing(index):
    for forget in (index.forget, index.cleared):
        index.stored("a", HBM, run())
        index.stored("b", HBM, run())
        index.speculate("a", keys(salt="x"))
        forget("a")
        assert index.match(keys(), ["a", "b"]) == [Hits(), Hits(16)]
        assert hits(index, of=keys(salt="x")) == Hits()


def test_case_14_removing_the_hbm_copy_keeps_the_dram_copy(index):
    index.stored("a", HBM, run())
    for first in range(0, 16, 4):
        index.stored("a", DRAM, run(first, first + 4))
    index.removed("a", HBM, hashes()[6:])
    assert hits(index) == Hits(6, 10)
    index.cleared("a", HBM)
    assert hits(index) == Hits(0, 16)
    index.cleared("a", DRAM)
    assert hits(index) == Hits()


@pytest.mark.parametrize("described", [True, False])
def test_case_14_chunks_are_credited_whole_or_not_at_all(index, described):
    index.stored("a", HBM, run(0, 10))
    chunk = run(4, 8)
    placeholder = StoredBlocks([hashes()[7]], chunk_blocks=4)
    index.stored("a", DRAM, chunk if described else placeholder)
    index.cleared("a", HBM)
    index.stored("a", HBM, run(0, 3))
    assert hits(index) == Hits(3), "the chunk of blocks 0 to 3 is not in DRAM"
    index.stored("a", HBM, run(3, 5))
    assert hits(index) == Hits(5, 3)
    assert index.match(keys()[:7], ["a"]) == [Hits(5)], "the prompt ends within the chunk"
    index.removed("a", DRAM, chunk.hashes if described else placeholder.hashes)
    assert hits(index) == Hits(5)


def test_offload_events_without_tokens_are_resolved_by_what_hbm_said_before_or_says_later(index):
    index.stored("a", HBM, run(0, 8))
    index.stored("a", DRAM, StoredBlocks([hashes()[3], hashes()[11]], chunk_blocks=4))
    index.removed("a", HBM, hashes()[:8])
    index.stored("a", DRAM, StoredBlocks([hashes()[7]], chunk_blocks=4))
    assert (hits(index), index.parked) == (Hits(0, 8), 1)
    index.stored("a", HBM, run(8, 12))
    index.removed("a", HBM, hashes()[8:12])
    assert (hits(index), index.parked) == (Hits(0, 12), 0)


def test_the_store_counts_for_every_engine_of_its_pool(index):
    for target in ("a", "b"):
        index.join(target, "pool")
    index.join("c", "elsewhere")
    index.store_put("pool", hashes()[3::4], 4)
    assert index.match(keys(), ["a", "b", "c"]) == [Hits()] * 3, "nobody has said yet what these hashes mean"
    index.stored("a", HBM, run())
    index.stored("b", HBM, run(0, 2))
    assert index.match(keys(), ["a", "b", "c"]) == [Hits(16), Hits(2, 0, 14), Hits()]
    index.leave("a")
    index.store_evicted("pool", [hashes()[11]])
    assert index.match(keys(), ["a", "b", "c"]) == [Hits(), Hits(2, 0, 6), Hits()]
    index.store_cleared("pool")
    assert hits(index, "b") == Hits(2)


def test_dram_is_preferred_to_the_store_and_both_make_one_prefix(index):
    index.join("a", "pool")
    index.stored("a", HBM, run())
    index.store_put("pool", hashes()[3::4], 4)
    index.stored("a", DRAM, StoredBlocks([hashes()[3], hashes()[11]], chunk_blocks=4))
    index.cleared("a", HBM)
    assert hits(index) == Hits(0, 8, 8)


def test_engines_word_on_the_store_is_taken_until_it_speaks_for_itself(index):
    index.stored("a", STORE, run(0, 4))
    index.stored("a", STORE, StoredBlocks([hashes()[7]]))
    index.stored("a", HBM, run(4, 8))
    index.cleared("a")
    assert hits(index) == Hits(0, 0, 8)
    index.store_put("", [hashes()[3]])
    assert hits(index) == Hits(0, 0, 4)
    index.stored("a", STORE, run(4, 8))
    index.removed("a", STORE, hashes()[:4])
    assert hits(index) == Hits(0, 0, 4)
    index.store_put("", [hashes()[7]])
    assert hits(index) == Hits(0, 0, 8)


def test_engines_with_hash_seeds_of_their_own_are_known_by_the_same_keys(index):
    index.stored("a", HBM, run(seed="one"))
    index.stored("b", HBM, run(seed="other"))
    index.removed("b", HBM, hashes(seed="other")[4:])
    index.removed("b", HBM, hashes(seed="one")[:4])
    assert index.match(keys(), ["a", "b"]) == [Hits(16), Hits(4)]


def test_case_15_two_tenants_and_two_loras_share_no_entries(index):
    kinds = [{}, {"salt": "one"}, {"salt": "two"}, {"lora": "one"}, {"lora": "two"}, {"lora": "one", "salt": "one"}]
    for at, kind in enumerate(kinds):
        index.stored("a", HBM, run(0, 2 + at, **kind))
        index.stored("a", HBM, run(2 + at, 4 + at, **kind))
    assert [hits(index, of=keys(**kind)) for kind in kinds] == [Hits(4 + at) for at in range(len(kinds))]


def test_a_block_with_an_image_is_not_one_of_the_same_tokens(index):
    index.stored("a", HBM, run()._replace(extra_keys=[None, [["image", 1]], *[None] * 14]))
    assert hits(index) == Hits(1)


def test_only_the_group_of_full_attention_counts(index):
    window = {"kv_group": 0, "kv_kind": "sliding_window"}
    full = {"kv_group": 1, "kv_kind": "full_attention"}
    index.stored("a", HBM, run(0, 8)._replace(**window))
    assert hits(index) == Hits()
    index.stored("a", HBM, run(0, 8)._replace(**full))
    index.removed("a", HBM, hashes()[:4], 0)
    assert hits(index) == Hits(8)
    index.removed("a", HBM, hashes()[4:8], 1)
    assert hits(index) == Hits(4)
    assert index.ignored["kv_group"] == 8


def test_a_dispatched_request_counts_for_a_while_and_then_only_if_the_engine_says_so(index, clock):
    index.speculate("a", keys()[:8])
    assert index.match(keys(), ["a", "b"]) == [Hits(8), Hits()]
    index.stored("a", HBM, run(0, 4))
    clock.now = 9.0
    index.speculate("a", keys()[:6])
    clock.now = 11.0
    assert hits(index) == Hits(6)
    clock.now = 20.0
    assert (hits(index), index.guesses) == (Hits(4), 0)


def test_what_an_engine_says_of_a_block_beats_the_guess(index):
    index.speculate("a", keys()[:8])
    index.stored("a", HBM, run(0, 4))
    index.removed("a", HBM, [hashes()[3]])
    assert hits(index) == Hits(3)


def test_it_says_why_it_knows_nothing(index):
    index.join("a")
    assert index.silence("a") == index.silence("nobody") == "no_events"
    index.stored("a", HBM, run())
    assert index.silence("a") == ""
    index.set_silence("a", "stale")
    index.stored("a", HBM, run())
    assert index.silence("a") == "stale"
    index.set_silence("a", "")
    index.forget("a")
    assert index.silence("a") == "no_events"


@pytest.mark.parametrize(
    "bad",
    [
        run()._replace(token_ids=TOKENS[:-1]),
        run()._replace(block_tokens=3),
        run()._replace(hashes=[-1] * 16),
        run()._replace(hashes=[2**64] * 16),
        run()._replace(token_ids=[-1] * 64),
        run()._replace(token_ids=["x"] * 64),
        run()._replace(token_ids=[2**32] * 64, parent=1),
        run()._replace(extra_keys=[None]),
    ],
)
def test_malformed_events_are_counted_and_change_nothing(index, bad):
    index.stored("a", HBM, bad)
    assert (index.size, index.keys, index.parked) == (0, 0, 0)
    assert index.ignored["malformed"] == 16


def test_media_go_by_vllms_names_and_unknown_ones_are_worth_nothing():
    named = [Medium.named(name) for name in ("GPU", "CPU", "STORAGE", None, "TAPE", "")]
    assert named == [HBM, DRAM, STORE, HBM, None, None]


def test_too_little_memory_is_refused():
    with pytest.raises(UserError, match="max_bytes"):
        KvIndex(max_bytes=1000, now=Clock())
