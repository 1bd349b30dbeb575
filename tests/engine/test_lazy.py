"""With lazy admission nothing leaves HBM before something is pushed out of it, and then nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvhearth.engine import EngineConfig, EngineModel, JobKind, OffloadMode, Sources
from kvhearth.errors import UserError

# Chunks of 8 tokens; HBM holds 24 blocks, and looks one block ahead.
LAZY = EngineConfig(
    num_blocks=24,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=7,
    max_model_len=97,
    mode=OffloadMode.NATIVE,
    blocks_per_chunk=2,
    dram_chunks=40,
    chunk_bytes=100,
    dram_admission="lazy",
)


def test_while_hbm_has_room_nothing_is_saved(prompts: Any, scripted: Any, finish: Any) -> None:
    make, port, engine = prompts(4), scripted(), EngineModel(LAZY)
    for words in ("abcd", "efgh", "abcdij"):
        engine.submit(make.request(words, 4 * len(words) + 1, 3))
        finish(engine, port)
    assert port.jobs == []
    assert engine.counters.prefix_cache_hits == 16


def test_what_is_pushed_out_is_saved_first_and_comes_back(prompts: Any, scripted: Any, finish: Any) -> None:
    # With 40 tokens a step, more blocks are handed out at once than are looked at ahead: the step has to wait.
    make, port, engine = prompts(4), scripted(flush_ns=5), EngineModel(replace(LAZY, max_num_batched_tokens=40))
    engine.submit(make.request("abcdefgh", 34, 1))
    finish(engine, port)
    assert port.jobs == []
    engine.submit(make.request([], 90, 2))
    waited = 0
    while engine.has_work:
        waited += engine.step(port).duration_ns
    saved = [key for job in port.of(JobKind.SAVE) for key in job.keys]
    again = make.request("abcdefgh", 34, 1)
    assert set(again.block_hashes[1::2]) <= set(saved)
    assert waited == 5 * len([job for job in port.of(JobKind.SAVE) if job.job_id in port.flushed]) > 0
    engine.submit(again)
    assert finish(engine, port)[0].sources == Sources(hbm=4, dram=28, compute=2)


def test_chunks_next_in_line_are_saved_ahead_and_nobody_waits_for_them(
    prompts: Any, scripted: Any, finish: Any
) -> None:
    make, port, engine = prompts(4), scripted(flush_ns=5), EngineModel(LAZY)
    engine.submit(make.request("abcdefgh", 34, 1))
    finish(engine, port)
    engine.submit(make.request([], 28, 60))  # a block in four steps
    finish(engine, port)
    assert len(port.of(JobKind.SAVE)) == 4
    assert port.flushed == []


def test_a_preempted_requests_chunks_are_not_lost(prompts: Any, scripted: Any, finish: Any) -> None:
    make, port = prompts(4), scripted()
    engine = EngineModel(replace(LAZY, num_blocks=13, max_model_len=53, max_num_batched_tokens=64))
    for i in range(3):
        engine.submit(make.request([f"r{i}"] * 6, 24, 20))
    assert len(finish(engine, port)) == 3
    assert engine.counters.preemptions > 0
    assert engine.counters.reprefills_avoided > 0


def test_another_admission_is_refused() -> None:
    with pytest.raises(UserError, match=r"^dram_admission: "):
        EngineModel(replace(LAZY, dram_admission="sometimes"))  # type: ignore[arg-type]
