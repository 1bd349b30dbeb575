"""What the router's KV index costs: blocks a second taken in with hashing of their tokens, removal, matching, and
memory in the worst case of one holder a block: ``python bench/router_index.py [--blocks N] [--quick]``; no engine is
needed. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence

from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.ports import EngineView, RouteRequest
from kvhearth.routing.ttft import Predictor

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 512
QUICK_BLOCKS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="block-holders in all")
    parser.add_argument("--targets", type=int, default=64, help="targets that share them evenly")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS} blocks")
    arguments = parser.parse_args()
    blocks = QUICK_BLOCKS if arguments.quick else arguments.blocks
    results = {
        "ingest_blocks_per_second": {str(run): round(ingest(blocks, arguments.targets, run)) for run in (1, 16, 512)},
        "removals_per_second": round(removal(min(blocks, 200_000))),
        **matching(blocks, arguments.targets),
        **memory(blocks),
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    print(json.dumps(results))


def make_index(blocks: int) -> KvIndex:
    return KvIndex(max_bytes=max(blocks, 1000) * 300, now=time.monotonic)


def random_run(rng: random.Random, blocks: int, parent: int | None = None) -> StoredBlocks:
    """Blocks of one chain with random tokens and hashes, as an event tells them."""
    tokens = [rng.randrange(150_000) for _ in range(blocks * BLOCK_TOKENS)]
    return StoredBlocks([rng.getrandbits(64) for _ in range(blocks)], parent, tokens, BLOCK_TOKENS)


def ingest(blocks: int, targets: int, run: int) -> float:
    """Blocks a second from events of ``run`` blocks, hashing their tokens; each target's events are one chain."""
    rng = random.Random(1)
    names = [f"engine-{number}" for number in range(targets)]
    index = make_index(blocks)
    parents: dict[str, int] = {}
    taken, seconds = 0, 0.0
    while taken < blocks:
        events = []
        for at in range(max(1, 4096 // run)):
            name = names[at % targets]
            event = random_run(rng, run, parents.get(name))
            parents[name] = event.hashes[-1]
            events.append((name, event))
        began = time.perf_counter()
        for name, event in events:
            index.stored(name, Medium.HBM, event)
        seconds += time.perf_counter() - began
        taken += len(events) * run
    if index.size != taken:
        raise RuntimeError(f"{index.size} of {taken} blocks were taken in")
    return taken / seconds


def removal(blocks: int) -> float:
    """Removals a second, one block an event as vLLM's block pool tells them."""
    rng = random.Random(2)
    index = make_index(blocks)
    hashes: list[int] = []
    while len(hashes) < blocks:
        event = random_run(rng, 64)
        index.stored("engine", Medium.HBM, event)
        hashes += event.hashes
    rng.shuffle(hashes)
    began = time.perf_counter()
    for hash_ in hashes:
        index.removed("engine", Medium.HBM, [hash_])
    return len(hashes) / (time.perf_counter() - began)


def matching(blocks: int, targets: int) -> dict[str, float]:
    """Milliseconds (median) to match a prompt of 512 blocks: against 8 and all targets, each holding a different
    share of it in HBM; the same with the rest in DRAM and the store; and to make its keys from 8,192 token ids."""
    rng = random.Random(3)
    names = [f"engine-{number}" for number in range(targets)]
    index = make_index(blocks)
    prompt = random_run(rng, PROMPT_BLOCKS)
    keys = block_keys(prompt.token_ids, BLOCK_TOKENS, chain_seed())
    for at, name in enumerate(names):
        share = PROMPT_BLOCKS * (at + 1) // targets
        index.stored(name, Medium.HBM, prompt._replace(
            hashes=prompt.hashes[:share], token_ids=prompt.token_ids[: share * BLOCK_TOKENS]
        ))  # fmt: skip
    while index.size < blocks:
        index.stored(rng.choice(names), Medium.HBM, random_run(rng, 64))
    results = {
        "match_8_targets_ms": median_ms(lambda: index.match(keys, names[:8])),
        f"match_{targets}_targets_ms": median_ms(lambda: index.match(keys, names)),
        "keys_of_8192_tokens_ms": median_ms(lambda: block_keys(prompt.token_ids, BLOCK_TOKENS, chain_seed())),
    }
    results[f"decision_{targets}_targets_ms"] = decision_ms(index, prompt.token_ids, names)
    ends = prompt.hashes[15::16]
    for name in names:
        index.stored(name, Medium.DRAM, StoredBlocks(ends[:-4], chunk_blocks=16))
    index.store_put("", ends, 16)
    results["match_8_targets_with_tiers_ms"] = median_ms(lambda: index.match(keys, names[:8]))
    results[f"match_{targets}_targets_with_tiers_ms"] = median_ms(lambda: index.match(keys, names))
    return results


def decision_ms(index: KvIndex, token_ids: Sequence[int], names: list[str]) -> float:
    """Milliseconds (median) of a whole decision of kv-aware: keys of the ids, hits and prediction for each target."""
    policy = KvAware(index, Predictor(), random.Random(0))
    views = [EngineView(name, 3, 9000, 4000, 0, 3, 1.0) for name in names]

    def decide() -> None:
        keys = block_keys(token_ids, BLOCK_TOKENS, chain_seed())
        request = RouteRequest("m", (), len(token_ids), "", keys, BLOCK_TOKENS)
        if policy.pick(request, views).engine is None:
            raise RuntimeError("no engine was picked")

    return median_ms(decide)


def median_ms(call: Callable[[], object], times: int = 200) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return round(statistics.median(taken) * 1e3, 4)


def memory(blocks: int) -> dict[str, float]:
    """Bytes a block-holder by tracemalloc while the index grows, each block on one of 8 targets: the worst on the way
    and at the end; and after everything was replaced three times."""
    rng = random.Random(4)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = make_index(blocks)
    worst = 0.0
    while index.size < blocks:
        for number in range(64):
            index.stored(f"engine-{number % 8}", Medium.HBM, random_run(rng, 16))
        if index.size > 50_000:
            worst = max(worst, (tracemalloc.get_traced_memory()[0] - before) / index.size)
    end = (tracemalloc.get_traced_memory()[0] - before) / index.size
    tracemalloc.stop()
    del index
    gc.collect()
    return {
        "worst_bytes_per_block_holder": round(worst, 1),
        "bytes_per_block_holder": round(end, 1),
        "turned_over_bytes_per_block_holder": round(turned_over(min(blocks, 200_000)), 1),
    }


def turned_over(blocks: int) -> float:
    """As `memory`, after each block was removed and another stored three times in random order."""
    rng = random.Random(5)
    events = [(f"engine-{at % 8}", random_run(rng, 16)) for at in range(blocks // 16)]
    new = [[random_run(rng, 16) for _ in events] for _ in range(3)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = make_index(blocks)
    for name, event in events:
        index.stored(name, Medium.HBM, event)
    for batch in new:
        order = list(range(len(events)))
        rng.shuffle(order)
        for at in order:
            name, event = events[at]
            index.removed(name, Medium.HBM, event.hashes)
            events[at] = (name, batch[at])
            index.stored(name, Medium.HBM, batch[at])
    del order
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / index.size


if __name__ == "__main__":
    main()
