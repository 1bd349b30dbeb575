"""The simulated router sees what the simulated engines hold, at once and exactly."""

from __future__ import annotations

from functools import partial

from kvhearth.cost import CostModel
from kvhearth.engine import EngineModel
from kvhearth.engine.links import modelled_links
from kvhearth.engine.ports import EngineConfig, EngineRequest, OffloadMode
from kvhearth.planner.holders import ClusterHolders
from kvhearth.planner.virtual import VirtualStore, VirtualTransfers
from kvhearth.routing.ports import Hits

COST = CostModel("llama-3.1-8b", "h100-sxm")
CHUNK = COST.kv_bytes(32)
LINKS = partial(modelled_links, COST, "ethernet-100g", CHUNK)


def engine(blocks: int = 64) -> EngineModel:
    return EngineModel(
        EngineConfig(
            num_blocks=blocks,
            block_size=16,
            mode=OffloadMode.SHARED,
            blocks_per_chunk=2,
            dram_chunks=1000,
            chunk_bytes=CHUNK,
        )
    )


def serve(model: EngineModel, port: VirtualTransfers, name: str, keys: list[int]) -> None:
    model.submit(EngineRequest(name, len(keys) * 16, 1, keys))
    while model.has_work:
        model.step(port)
        port.now_ns += 10_000_000


def test_each_tier_is_credited_behind_the_one_above_it_and_chunks_whole():
    store = VirtualStore(1000)
    first, other = engine(), engine()
    port = VirtualTransfers(LINKS(), store)
    holders = ClusterHolders({"first": first, "other": other}, store.leading_held)
    keys = list(range(100, 109))  # four chunks and a block
    assert holders.match(keys, ["first", "other"]) == [Hits(), Hits()]
    serve(first, port, "r", keys)
    assert holders.match(keys, ["first", "other"]) == [Hits(hbm=9), Hits(store=8)]
    assert first.reset_prefix_cache()
    assert holders.match(keys, ["first", "other"]) == [Hits(dram=8), Hits(store=8)]
    assert first.reset_prefix_cache(reset_external=True)
    assert holders.match([*keys[:5], 7, 8], ["first"]) == [Hits(store=4)]


def test_what_was_just_dispatched_counts_until_the_engine_itself_has_it():
    model = engine()
    holders = ClusterHolders({"a": model}, VirtualStore(0).leading_held)
    keys = [1, 2, 3]
    holders.speculate("a", keys)
    holders.speculate("a", keys[:2])
    assert holders.match([1, 2, 3, 4], ["a"]) == [Hits(hbm=3)]
    holders.settle("a", keys)
    assert holders.match([1, 2, 3, 4], ["a"]) == [Hits(hbm=2)]
    holders.settle("a", keys[:2])
    assert holders.match([1, 2, 3, 4], ["a"]) == [Hits()]
    assert holders.silence("a") == ""
