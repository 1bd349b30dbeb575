"""KV leaves HBM, comes back from DRAM or the store, and nobody waits for what does not come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvhearth.engine import EngineConfig, EngineModel, EngineRequest, Job, JobKind, OffloadMode, Sources

# Chunks of 8 tokens. HBM holds one long request at a time, so the next one pushes the last one's blocks out.
NATIVE = EngineConfig(
    num_blocks=12,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=49,
    mode=OffloadMode.NATIVE,
    blocks_per_chunk=2,
    dram_chunks=20,
    chunk_bytes=100,
)
SHARED = replace(NATIVE, mode=OffloadMode.SHARED)


def one(engine: EngineModel, port: Any, request: EngineRequest, finish: Any) -> Any:
    engine.submit(request)
    return finish(engine, port)[0]


def flood(make: Any) -> EngineRequest:
    """A request that takes all of HBM."""
    request: EngineRequest = make.request([], 47, 2)
    return request


def chunk_keys(request: EngineRequest, count: int) -> tuple[int, ...]:
    """A chunk is named by its last block."""
    return tuple(request.block_hashes[2 * i + 1] for i in range(count))


def test_a_prompt_pushed_out_of_hbm_comes_back_from_dram_up_to_its_last_full_chunk(
    prompts: Any, scripted: Any, finish: Any
) -> None:
    make, port, engine = prompts(4), scripted(), EngineModel(NATIVE)
    first = one(engine, port, make.request("abcdefghi", 38, 2), finish)
    assert first.sources == Sources(compute=38)
    one(engine, port, flood(make), finish)
    again = make.request("abcdefghi", 38, 2)
    engine.submit(again)
    assert engine.step(port).waiting_on_transfers
    [load] = port.of(JobKind.LOAD)
    assert load.keys == chunk_keys(again, 4)
    assert load.nbytes == 400
    # 38 tokens hold four full chunks of 8: the request goes on at 32.
    assert engine.step(port).scheduled == {again.request_id: 6}
    [done] = finish(engine, port)
    assert done.sources == Sources(dram=32, compute=6)
    assert (engine.counters.reprefills_avoided, engine.counters.reprefill_avoided_tokens) == (1, 32)
    assert engine.counters.load_bytes == 400


def test_a_prompt_of_whole_chunks_is_loaded_whole_and_computes_only_its_last_token(
    prompts: Any, scripted: Any, finish: Any
) -> None:
    make, port, engine = prompts(4), scripted(), EngineModel(NATIVE)
    one(engine, port, make.request("abcdefgh", 32, 2), finish)
    one(engine, port, flood(make), finish)
    assert one(engine, port, make.request("abcdefgh", 32, 2), finish).sources == Sources(dram=31, compute=1)


def test_only_whole_chunks_beyond_the_local_hit_count(prompts: Any, scripted: Any, finish: Any) -> None:
    make, port, engine = prompts(4), scripted(), EngineModel(NATIVE)
    one(engine, port, make.request("abcdef", 24, 1), finish)
    one(engine, port, make.request([], 35, 1), finish)  # evicts the tail of the first: its last three blocks
    done = one(engine, port, make.request("abcdefghi", 40, 1), finish)
    # HBM still has three blocks, 12 tokens; the chunk that straddles them is loaded for its missing block as well.
    assert done.sources == Sources(hbm=12, dram=12, compute=16)
    assert len(port.of(JobKind.LOAD)[0].keys) == 2


def test_engines_share_through_the_store(prompts: Any, scripted: Any, finish: Any) -> None:
    make, store = prompts(4), set()
    first, second = EngineModel(SHARED), EngineModel(SHARED)
    a = make.request("abcdefghi", 38, 2)
    one(first, scripted(store), a, finish)
    assert set(chunk_keys(a, 4)) == store
    assert first.counters.put_bytes == first.counters.save_bytes == 400
    port = scripted(store, lookup_delay=2)
    done = one(second, port, make.request("abcdefghi", 38, 2), finish)
    assert done.sources == Sources(store=32, compute=6)
    assert [job.kind for job in port.jobs] == [JobKind.FETCH, JobKind.LOAD]
    assert second.counters.fetch_bytes == 400
    assert port.questions == 1


def test_dram_supplies_the_leading_chunks_and_the_store_those_that_follow(
    prompts: Any, scripted: Any, finish: Any
) -> None:
    make, store = prompts(4), set()
    engine = EngineModel(SHARED)
    port = scripted(store)
    one(engine, port, make.request("abcd", 16, 1), finish)
    longer = make.request("abcdefghi", 36, 1)
    one(EngineModel(SHARED), scripted(store), longer, finish)
    one(engine, port, flood(make), finish)
    again = make.request("abcdefghi", 36, 1)
    assert one(engine, port, again, finish).sources == Sources(dram=16, store=16, compute=4)
    [fetch] = port.of(JobKind.FETCH)
    assert fetch.keys == chunk_keys(again, 4)[2:]


def test_while_one_request_waits_for_the_store_others_go_on(prompts: Any, scripted: Any, finish: Any) -> None:
    make = prompts(4)
    slow = make.request("abcdefgh", 33, 2)
    port = scripted(set(chunk_keys(slow, 4)), delay=lambda job: 9 if job.kind is JobKind.FETCH else 0)
    engine = EngineModel(SHARED)
    engine.submit(slow)
    quick = make.request([], 7, 3)
    engine.submit(quick)
    assert engine.step(port).scheduled == {quick.request_id: 7}
    order = [f.request_id for f in finish(engine, port)]
    assert order == [quick.request_id, slow.request_id]


def test_what_a_failed_fetch_does_not_bring_is_computed(prompts: Any, scripted: Any, finish: Any) -> None:
    for arrived in (0, 1):
        make = prompts(4)
        request = make.request("abcdefghi", 38, 2)

        def ok(job: Job, arrived: int = arrived) -> int:
            return arrived if job.kind is JobKind.FETCH else len(job.keys)

        port = scripted(set(chunk_keys(request, 4)), ok=ok)
        engine = EngineModel(SHARED)
        done = one(engine, port, request, finish)
        assert done.sources == Sources(store=8 * arrived, compute=38 - 8 * arrived)
        assert engine.counters.failed_loads == 1
        assert len(port.of(JobKind.FETCH)) == 1  # not tried again


def test_a_chain_longer_than_dram_is_not_fetched_for_ever(prompts: Any, scripted: Any, finish: Any) -> None:
    """Fetching its tail evicts its head; vLLM by itself would then fetch the head again, and so on."""
    make, engine = prompts(4), EngineModel(replace(SHARED, dram_chunks=3))
    request = make.request("abcdefgh", 33, 2)
    port = scripted(set(chunk_keys(request, 4)))
    done = one(engine, port, request, finish)
    assert sum(len(job.keys) for job in port.of(JobKind.FETCH)) <= 2 * 3
    assert done.sources.compute < 33


def test_preempted_requests_come_back_from_dram(prompts: Any, scripted: Any, finish: Any) -> None:
    config = replace(NATIVE, num_blocks=13, max_model_len=53, offload_prompt_only=False)
    make = prompts(4)
    engines = [EngineModel(replace(config, mode=mode)) for mode in (OffloadMode.NONE, OffloadMode.NATIVE)]
    requests = [make.request([f"r{i}"] * 6, 24, 20) for i in range(3)]
    for engine in engines:
        for request in requests:
            engine.submit(request)
        assert len(finish(engine, scripted())) == 3
        assert engine.counters.preemptions > 0
    none, native = (engine.counters for engine in engines)
    assert none.reprefills_avoided == 0
    assert native.reprefills_avoided > 0
    assert native.reprefill_tokens < none.reprefill_tokens
    # A preempted request's prompt keeps the source it had first.
    assert native.prompt_tokens_compute == none.prompt_tokens_compute == 72


def test_a_step_that_reuses_blocks_waits_for_the_saves_that_read_them(prompts: Any, scripted: Any, finish: Any) -> None:
    make, engine = prompts(4), EngineModel(NATIVE)
    port = scripted(delay=lambda job: 50, flush_ns=7)
    engine.submit(make.request([], 40, 1))
    engine.step(port)
    assert engine.has_work  # the request is gone, its save is still to start
    assert engine.blocks_used == 0  # and its blocks are free
    engine.submit(make.request([], 4, 2))
    step = engine.step(port)
    assert len(step.scheduled) == 1  # two blocks were never used
    assert step.duration_ns == 0
    assert port.flushed == []
    engine.submit(make.request([], 36, 1))
    step = engine.step(port)
    assert len(step.scheduled) == 2
    assert step.duration_ns == 7
    assert port.flushed == [job.job_id for job in port.of(JobKind.SAVE)]
    finish(engine, port)


def test_a_preempted_requests_saves_are_waited_for(prompts: Any, scripted: Any, finish: Any) -> None:
    engine = EngineModel(replace(NATIVE, num_blocks=8, max_model_len=33))
    make, port = prompts(4), scripted(delay=lambda job: 50)
    for _ in range(2):
        engine.submit(make.request([], 16, 8))
    while not (step := engine.step(port)).preempted:
        assert port.flushed == []
    _first, second = port.of(JobKind.SAVE)
    assert step.preempted == ["r2"]
    assert port.flushed == [second.job_id]
    assert len(finish(engine, port)) == 2


def test_a_save_that_dram_has_no_room_for_is_offered_again_and_stops_nobody(
    prompts: Any, scripted: Any, finish: Any
) -> None:
    make, engine = prompts(4), EngineModel(replace(NATIVE, dram_chunks=5))
    hold = {"steps": 50}
    port = scripted(delay=lambda job: hold["steps"])
    engine.submit(make.request([], 16, 9))
    engine.submit(make.request([], 32, 9))
    engine.step(port)
    engine.step(port)
    # Two chunks and four: not all of the four fit, so none is taken.
    assert [len(job.keys) for job in port.of(JobKind.SAVE)] == [2]
    hold["steps"] = 0
    port.flush([job.job_id for job in port.of(JobKind.SAVE)])
    assert len(finish(engine, port)) == 2
    assert [len(job.keys) for job in port.of(JobKind.SAVE)] == [2, 4]


def test_puts_under_way_keep_their_chunks_in_dram(prompts: Any, scripted: Any, finish: Any) -> None:
    make, engine = prompts(4), EngineModel(replace(SHARED, dram_chunks=8))
    port = scripted(delay=lambda job: 100 if job.kind is JobKind.PUT else 0)
    for _ in range(6):
        engine.submit(make.request([], 40, 2))
    assert len(finish(engine, port)) == 6
    assert port.most_in_flight <= 8
    assert engine.counters.put_bytes == engine.counters.save_bytes


def test_a_chunk_is_saved_once_however_many_requests_share_it(prompts: Any, scripted: Any, finish: Any) -> None:
    make, engine, port = prompts(4), EngineModel(NATIVE), scripted()
    for _ in range(3):
        one(engine, port, make.request("abcd", 16, 1), finish)
    [save] = port.of(JobKind.SAVE)
    assert len(save.keys) == 2


def test_a_load_takes_no_blocks_that_a_prefill_under_way_needs(prompts: Any, scripted: Any, finish: Any) -> None:
    make = prompts(4)
    config = replace(NATIVE, max_num_batched_tokens=16)
    engine, port = EngineModel(config), scripted()
    one(engine, port, make.request("abcdef", 25, 1), finish)
    one(engine, port, flood(make), finish)
    engine.submit(make.request([], 30, 1))
    engine.submit(make.request("abcdef", 25, 1))
    first = engine.step(port)
    assert list(first.scheduled.values()) == [16]
    engine.step(port)
    assert not engine.step(port).preempted
    assert len(finish(engine, port)) == 1
    assert engine.counters.preemptions == 0


def test_the_reset_of_hbm_leaves_dram_alone_unless_told(prompts: Any, scripted: Any, finish: Any) -> None:
    for external, sources in ((False, Sources(dram=31, compute=1)), (True, Sources(compute=32))):
        make, port, engine = prompts(4), scripted(), EngineModel(NATIVE)
        one(engine, port, make.request("abcdefgh", 32, 1), finish)
        assert engine.reset_prefix_cache(reset_external=external)
        assert one(engine, port, make.request("abcdefgh", 32, 1), finish).sources == sources
