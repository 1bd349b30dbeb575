"""The engine model keeps its blocks, loses no request, and accounts for every token, in all modes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.engine import EngineConfig, EngineModel, EngineRequest, Finished, Job, NoTransfers, OffloadMode
from kvhearth.errors import UserError

SMALL = EngineConfig(num_blocks=24, block_size=4, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=97)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    mode = draw(st.sampled_from(OffloadMode))
    num_blocks, block_size = draw(st.integers(2, 40)), draw(st.sampled_from((1, 2, 4, 16)))
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 8)),
        max_num_batched_tokens=draw(st.integers(1, 96)),
        max_model_len=num_blocks * block_size + 1,
        long_prefill_token_threshold=draw(st.sampled_from((0, 7))),
        watermark=draw(st.sampled_from((0.0, 0.2))),
        enable_prefix_caching=draw(st.booleans()),
        mode=mode,
        blocks_per_chunk=draw(st.integers(1, 3)),
        dram_chunks=draw(st.integers(1, 30)),
        chunk_bytes=1000,
        offload_prompt_only=draw(st.booleans()),
    )


def some_requests(prompts: Any, config: EngineConfig, seed: int, count: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    make = prompts(config.block_size)
    longest = config.max_model_len
    out = []
    for _ in range(count):
        prompt = rng.randint(1, longest - 1)
        words = [(rng.randrange(3) if i == 0 else 0, i) for i in range(rng.randrange(12))]
        out.append(make.request(words, prompt, rng.randint(1, min(30, longest - prompt))))
    return out


@settings(max_examples=120, deadline=None)
@given(configs(), st.integers(0, 10**6), st.integers(1, 12))
def test_every_request_ends_and_every_token_is_accounted_for_whatever_the_transfers_do(
    scripted: Any, prompts: Any, config: EngineConfig, seed: int, count: int
) -> None:
    rng = random.Random(seed)

    def delay(job: Job) -> int:
        return rng.choice((0, 0, 1, 5, 40))

    def arrives(job: Job) -> int:
        return rng.randint(0, len(job.keys)) if rng.random() < 0.2 else len(job.keys)

    requests = some_requests(prompts, config, seed, count)
    store: set[int] = {h for r in requests for h in r.block_hashes if rng.random() < 0.5}
    port = scripted(store, delay, arrives, lookup_delay=rng.randrange(3))
    engine = EngineModel(config)
    waiting = list(requests)
    finished: list[Finished] = []
    computed = 0
    for _ in range(20_000):
        while waiting and rng.random() < 0.3:
            engine.submit(waiting.pop())
        if not engine.has_work and not waiting:
            break
        step = engine.step(port)
        engine.check_integrity()
        computed += sum(step.scheduled.values())
        finished += step.finished
        assert sum(step.scheduled.values()) <= config.max_num_batched_tokens
        assert len(step.scheduled) <= config.max_num_seqs
        if step.waiting_on_transfers:
            assert not step.scheduled
            assert port.in_flight or port.lookups
    # No request is lost, and nothing stays behind.
    assert {f.request_id for f in finished} == {r.request_id for r in requests}
    assert engine.blocks_used == 0
    assert not port.in_flight
    assert not port.lookups
    # Sums: each prompt token has one source, and what was computed is what had no other source, plus what was repeated.
    c = engine.counters
    assert all(sum(f.sources) == f.prompt_tokens and min(f.sources) >= 0 for f in finished)
    assert c.prompt_tokens == sum(r.prompt_tokens for r in requests)
    assert c.generation_tokens == sum(r.output_tokens for r in requests)
    by_source = (c.prompt_tokens_hbm, c.prompt_tokens_dram, c.prompt_tokens_store, c.prompt_tokens_compute)
    assert by_source == tuple(sum(f.sources[i] for f in finished) for i in range(4))
    generated_and_computed = sum(r.output_tokens - 1 for r in requests)
    assert computed == c.prompt_tokens_compute + generated_and_computed + c.reprefill_tokens
    if config.mode is OffloadMode.NONE:
        assert c.prompt_tokens_dram == c.prompt_tokens_store == c.reprefills_avoided == 0
    if c.preemptions == 0:
        assert c.reprefill_tokens == 0
    assert c.preemptions == sum(f.preemptions for f in finished)
    assert c.reprefill_tokens == sum(f.reprefill_tokens for f in finished)


@settings(max_examples=60, deadline=None)
@given(configs(), st.integers(0, 10**6))
def test_aborted_requests_leave_nothing_behind(
    scripted: Any, prompts: Any, finish: Callable[..., list[Finished]], config: EngineConfig, seed: int
) -> None:
    rng = random.Random(seed)
    requests = some_requests(prompts, config, seed, 10)
    port = scripted({h for r in requests for h in r.block_hashes}, lambda job: rng.randrange(6), lookup_delay=1)
    engine = EngineModel(config)
    for request in requests:
        engine.submit(request)
    done: set[str] = set()
    gone = {r.request_id for r in requests if rng.random() < 0.6}
    for request_id in sorted(gone):
        for _ in range(rng.randrange(4)):
            done |= {f.request_id for f in engine.step(port).finished}
        assert engine.abort(request_id) == (request_id not in done)
        engine.check_integrity()
    done |= {f.request_id for f in finish(engine, port)}
    assert done | gone == {r.request_id for r in requests}
    assert engine.blocks_used == 0
    assert engine.reset_prefix_cache(reset_external=True)


def run_one_by_one(engine: EngineModel, port: Any, requests: list[EngineRequest], finish: Any) -> None:
    for request in requests:
        engine.submit(request)
        finish(engine, port)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(24, 60))
def test_more_hbm_never_means_fewer_hits_for_requests_one_after_another(
    prompts: Any, scripted: Any, finish: Any, seed: int, num_blocks: int
) -> None:
    requests = some_requests(prompts, SMALL, seed, 25)
    hits = []
    for blocks in (num_blocks, num_blocks + 7, num_blocks * 4):
        engine = EngineModel(replace(SMALL, num_blocks=blocks))
        run_one_by_one(engine, scripted(), requests, finish)
        hits.append(engine.counters.prefix_cache_hits)
    assert hits == sorted(hits)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_no_dram_has_more_hits_than_one_that_holds_everything(
    prompts: Any, scripted: Any, finish: Any, seed: int
) -> None:
    requests = some_requests(prompts, SMALL, seed, 25)
    hits = []
    for chunks in (24, 40, 80, 2000):
        engine = EngineModel(replace(SMALL, mode=OffloadMode.NATIVE, dram_chunks=chunks))
        run_one_by_one(engine, scripted(), requests, finish)
        hits.append(engine.counters.prompt_tokens_hbm + engine.counters.prompt_tokens_dram)
    # Between two that are too small it need not be so: a request's saves can push out the chunks it has just loaded.
    assert hits[-1] == max(hits)


def test_where_offloading_raises_hits_fewer_tokens_are_computed(prompts: Any, scripted: Any) -> None:
    raised = 0
    for seed in range(20):
        requests = some_requests(prompts, SMALL, seed, 25)
        hits, tokens = [], []
        for mode in (OffloadMode.NONE, OffloadMode.NATIVE):
            engine, port = EngineModel(replace(SMALL, mode=mode, dram_chunks=500)), scripted()
            computed = 0
            for request in requests:
                engine.submit(request)
                while engine.has_work:
                    computed += sum(engine.step(port).scheduled.values())
            hits.append(engine.counters.prompt_tokens_hbm + engine.counters.prompt_tokens_dram)
            tokens.append(computed)
        assert hits[0] <= hits[1]
        assert tokens[0] - tokens[1] == hits[1] - hits[0]
        raised += hits[1] > hits[0]
    assert raised >= 10


def test_the_last_running_request_is_preempted_and_comes_back_first(prompts: Any, finish: Any, scripted: Any) -> None:
    engine = EngineModel(replace(SMALL, num_blocks=6, max_model_len=25, enable_prefix_caching=False))
    make = prompts(4)
    first, second = make.request([], 8, 10), make.request([], 8, 10)
    engine.submit(first)
    engine.submit(second)
    port = NoTransfers()
    while not (step := engine.step(port)).preempted:
        pass
    assert step.preempted == [second.request_id]
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    third = make.request([], 8, 1)
    engine.submit(third)
    while second.request_id not in (step := engine.step(port)).scheduled:
        assert third.request_id not in step.scheduled
    finished = {f.request_id: f for f in finish(engine, scripted())}
    assert finished[second.request_id].preemptions == 1
    # All that the second had computed is computed again: its prompt, and what it had generated but for the last token.
    assert finished[second.request_id].reprefill_tokens == engine.counters.reprefill_tokens > 8


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(prompts: Any, finish: Any, scripted: Any) -> None:
    engine = EngineModel(SMALL)
    make = prompts(4)
    words = list("abcdef")
    run_one_by_one(engine, scripted(), [make.request(words, 24, 1)], finish)
    engine.submit(make.request(words, 24, 1))
    [done] = finish(engine, scripted())
    assert done.sources == (20, 0, 0, 4)


def test_the_step_cost_sees_prefills_and_decodes_apart(prompts: Any) -> None:
    seen: list[tuple[list[tuple[int, int]], int, int]] = []

    class Cost:
        def step_ns(self, prefills: Any, n_decode: int, sum_context: int) -> int:
            seen.append((list(prefills), n_decode, sum_context))
            return 1_000 * len(seen)

    engine = EngineModel(replace(SMALL, max_num_batched_tokens=10), Cost())
    make = prompts(4)
    engine.submit(make.request([], 4, 3))
    engine.submit(make.request([], 14, 2))
    port = NoTransfers()
    durations = [engine.step(port).duration_ns for _ in range(3)]
    assert durations == [1_000, 2_000, 3_000]
    assert seen == [([(4, 0), (6, 0)], 0, 0), ([(8, 6)], 1, 5), ([], 2, 6 + 15)]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"watermark": 1.0}, "watermark"),
        ({"mode": OffloadMode.NATIVE}, "dram_chunks"),
        ({"enable_chunked_prefill": False}, "max_num_batched_tokens"),
        ({"chunk_bytes": -1}, "chunk_bytes"),
    ],
)
def test_impossible_limits_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=f"^{field}: ") as caught:
        EngineModel(replace(SMALL, **change))
    assert caught.value.remedy


def test_a_request_that_could_never_run_is_refused_on_submission(prompts: Any) -> None:
    make = prompts(4)
    engine = EngineModel(replace(SMALL, max_model_len=1000))
    engine.submit(make.request([], 96, 1))  # fills HBM exactly: the last token is never computed
    for bad in (
        make.request([], 96, 2),
        make.request([], 999, 2),
        make.request([], 0, 2),
        make.request([], 8, 0),
        EngineRequest("short", 8, 8, (1,)),
        EngineRequest("r1", 8, 1, (1, 2)),
    ):
        with pytest.raises(UserError):
            engine.submit(bad)
    assert engine.num_waiting == 1
