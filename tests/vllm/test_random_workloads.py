"""Random workloads on the rig: whatever comes together, no step reads KV that is not what it must be.

Prefixes are shared, requests are aborted, HBM and DRAM are tight, caches are reset and the store loses chunks, in every
combination of admission, chunk size and KV groups.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored

from .rig import BLOCK, Rig, WrongKv, tokens
from .servers import StoreProcess

SHAPES = list(itertools.product(("eager", "lazy"), (False, True), (1, 3), (True, False)))
ROOM = [(60, 40, 512), (40, 12, 64), (90, 120, 64)]
"""Blocks of HBM, chunks of DRAM and tokens a step; the last has more DRAM than HBM."""


def _play(rig: Rig, seed: int, store: StoreProcess | None) -> None:
    rnd = random.Random(seed)
    trunks = [tokens(seed * 10 + i, 400) for i in range(4)]
    names: list[str] = []
    for turn in range(60):
        what = rnd.random()
        if what < 0.45:
            trunk = rnd.choice(trunks)
            prompt = trunk[: rnd.randrange(1, 260)] + tokens(rnd.randrange(1 << 20), rnd.randrange(0, 60))
            names.append(f"r{turn}")
            rig.submit(names[-1], prompt, rnd.randrange(1, 40), salt=rnd.choice([None, None, "x"]))
        elif what < 0.5 and names:
            rig.abort(rnd.choice(names))
        elif what < 0.53:
            with contextlib.suppress(RuntimeError):  # vLLM's way to refuse while a load is under way
                rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        elif what < 0.56 and store is not None and rig.tier._admission.known:
            store.command(b"DEL", *rnd.sample(rig.tier._admission.known, min(4, len(rig.tier._admission.known))))
        for _ in range(rnd.randrange(1, 6)):
            rig.step()
    rig.finish(120)


def _drop_and_ask_again(rig: Rig, seed: int, blocks: int) -> None:
    """A prompt leaves HBM for others and comes again: something is loaded, whatever was drawn."""
    prompt = tokens(9000 + seed, 10 * BLOCK)
    rig.run("first", prompt)
    for turn in range(4):
        rig.run(f"push{turn}", tokens(9100 + 10 * seed + turn, blocks // 4 * BLOCK))
    rig.run("again", prompt)
    rig.finish(120)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("admission", "hybrid", "size", "shared"), SHAPES)
def test_no_step_reads_wrong_kv(admission: str, hybrid: bool, size: int, shared: bool, store: StoreProcess) -> None:
    totals: dict[str, float] = {}
    for seed, (blocks, dram_chunks, batched_tokens) in enumerate(ROOM):
        with Rig(
            store=store.address if shared else None,
            blocks=blocks,
            dram_chunks=dram_chunks,
            hybrid=hybrid,
            blocks_per_chunk=size,
            extra={"dram_admission": admission, "offload_prompt_only": bool(seed % 2)},
            batched_tokens=batched_tokens,
        ) as rig:
            _play(rig, seed, store if shared else None)
            if dram_chunks * size > blocks:
                _drop_and_ask_again(rig, seed, blocks)
            for name in ("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"):
                totals[name] = totals.get(name, 0) + rig.stats.get(name, 0)
            assert not rig.side._block_id_to_pending_jobs
            assert not rig.side._req_status
            assert not rig.side.manager._req_state
    assert min(totals.values()) > 0


@pytest.mark.parametrize("seed", range(2))
def test_lazy_loses_nothing_that_eager_keeps(seed: int) -> None:
    """With DRAM for everything, a prompt that has left HBM comes back whole under either admission."""
    for admission in ("eager", "lazy"):
        with Rig(blocks=40, dram_chunks=400, extra={"dram_admission": admission}) as rig:
            prompts = [tokens(seed * 100 + i, 200 + 10 * i) for i in range(8)]
            for turn, prompt in enumerate(prompts):
                rig.submit(f"a{turn}", prompt, 150)
            rig.finish(60)
            assert rig.preemptions > 0
            for turn, prompt in enumerate(prompts[:4]):
                rig.run(f"push{turn}", tokens(9000 + seed * 10 + turn, 400))
                rig.submit(f"b{turn}", prompt, 2)
                rig.step()
                local = rig.scheduler.requests[f"b{turn}"].prefill_stats.num_local_cached_tokens
                rig.finish()
                assert local + rig.hits[f"b{turn}"] >= (len(prompt) - 1) // BLOCK * BLOCK, (admission, turn)


def test_lazy_moves_nothing_while_hbm_has_room() -> None:
    with Rig(blocks=400, extra={"dram_admission": "lazy"}) as rig:
        for turn in range(20):
            rig.run(f"a{turn}", tokens(turn % 5, 300 + turn), 10)
        assert rig.stats.get("vllm:kv_offload_store_bytes", 0) == 0
    with Rig(blocks=400, extra={"dram_admission": "eager"}) as rig:
        rig.run("a", tokens(1, 300))
        assert rig.stats["vllm:kv_offload_store_bytes"] > 0


@pytest.mark.parametrize("admission", ["eager", "lazy"])
def test_events_of_chunks_in_dram_say_which_tokens_they_stand_for(admission: str) -> None:
    def with_events(config: Any) -> None:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    extra = {"dram_admission": admission, "self_describing_kv_events": True}
    with Rig(blocks=20, extra=extra, tweak=with_events) as rig:
        events: list[Any] = []
        take = rig.connector.take_events
        rig.connector.take_events = lambda: events.extend(list(take())) or events[:0]
        prompt = tokens(1, 10 * BLOCK)
        rig.run("a", prompt)
        rig.run("push", tokens(2, 15 * BLOCK))
        stored = [event for event in events if isinstance(event, BlockStored) and event.medium == "CPU"]
        slices = [prompt[at * BLOCK : (at + 1) * BLOCK] for at in range(10)]
        told = [event for event in stored if event.token_ids in slices]
        assert len(told) >= 5
        assert all(len(event.token_ids) == event.block_size == BLOCK for event in stored)


def test_the_rig_would_notice_wrong_bytes() -> None:
    with Rig() as rig:
        rig.run("a", tokens(1, 200))
        rig.forget_hbm()
        rig.side.manager.primary_tier.get_kv_memoryview().cast("B")[40] ^= 1
        with pytest.raises(WrongKv):
            rig.run("b", tokens(1, 200))


def test_nothing_stays_in_shared_memory() -> None:
    before = set(Path("/dev/shm").glob("vllm_offload_rig*"))
    with Rig() as rig:
        rig.run("a", tokens(1, 100))
        assert set(Path("/dev/shm").glob("vllm_offload_rig*")) == before  # the name goes once all have mapped it
    assert set(Path("/dev/shm").glob("vllm_offload_rig*")) == before


def test_settings_are_checked_when_the_engine_starts() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"dram_admission": "later"}, "dram_admission: 'later'; choose eager or lazy"),
        ({"snapshot_listen": "nowhere"}, "snapshot_listen"),
    ]
    for extra, message in bad:
        with pytest.raises(Exception, match=message):
            Rig(extra=extra)


def test_a_chunk_is_not_saved_from_a_block_that_held_something_else_meanwhile(store: StoreProcess) -> None:
    """A chunk of three blocks loses one to another request, which loses it in the step that takes the others."""
    for seed in range(8):
        with Rig(
            store=store.address,
            blocks=random.Random(seed).choice([40, 52] if seed % 2 else [24, 30]),
            dram_chunks=300,
            blocks_per_chunk=3,
            hybrid=bool(seed % 2),
            extra={"dram_admission": "lazy"},
            batched_tokens=64,
        ) as rig:
            rnd = random.Random(seed)
            for turn in range(60):
                rig.submit(f"a{turn}", tokens(rnd.randrange(6), rnd.randrange(20, 200)), rnd.randrange(1, 8))
                for _ in range(rnd.randrange(1, 4)):
                    rig.step()
            rig.finish(60)
            for turn in range(6):
                rig.forget_hbm()
                rig.run(f"b{turn}", tokens(turn, 200))


@pytest.mark.parametrize(
    ("admission", "size", "long", "short"), [("eager", 2, 11, 10), ("eager", 4, 11, 8), ("lazy", 2, 11, 10)]
)
def test_a_chunk_that_the_window_has_left_in_part_is_not_saved(
    admission: str, size: int, long: int, short: int
) -> None:
    """After a prefix hit, a sliding-window group has the last blocks only: the rest of a row would be another's KV."""
    prompt = tokens(1, 900)
    with Rig(
        hybrid=True, blocks_per_chunk=size, blocks=300, dram_chunks=20, extra={"dram_admission": admission}
    ) as rig:
        rig.run("first", prompt[: long * BLOCK + 3], 1)
        for seed in (50, 51):
            rig.run(f"others{seed}", tokens(seed, 600), 1)  # fill all of DRAM
        rig.run("hit", prompt[: long * BLOCK + 3], 1)
        rig.forget_hbm()
        rig.run("shorter", prompt[: short * BLOCK + 3], 1)
