"""Workloads for conformance: hypothesis strategies, and the same request for vLLM (tokens) and for us (hashes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from kvhearth.engine import EngineConfig, EngineRequest, OffloadMode
from kvhearth.engine.ports import DramAdmission

from .oracle_script import Script

SAMPLED_TOKEN = 7


class Arrival(NamedTuple):
    """A request that arrives before step ``step``; ``abort_after`` steps later its client is gone (None = it stays)."""

    step: int
    prompt: tuple[int, ...]
    output_tokens: int
    abort_after: int | None


class Workload(NamedTuple):
    """An engine and what comes to it, by step index."""

    config: EngineConfig
    arrivals: tuple[Arrival, ...]


class TieredWorkload(NamedTuple):
    """An engine with tiers behind its HBM, what comes to it, and how its transfers go."""

    config: EngineConfig
    arrivals: tuple[Arrival, ...]
    script: Script


def engine_request(request_id: str, prompt: Sequence[int], output_tokens: int, block_size: int) -> EngineRequest:
    """The request as our engine takes it: a chained hash over the tokens of each full block."""
    tokens = [*prompt, *([SAMPLED_TOKEN] * output_tokens)]
    hashes: list[int] = []
    parent = 0
    for i in range(len(tokens) // block_size):
        parent = hash((parent, *tokens[i * block_size : (i + 1) * block_size])) & (2**63 - 1)
        hashes.append(parent)
    return EngineRequest(request_id, len(prompt), output_tokens, tuple(hashes))


def chunk_names(arrival: Arrival, config: EngineConfig) -> tuple[int, ...]:
    """The request's chunks as the engine model names them: each by the hash of its last block."""
    hashes = engine_request("", arrival.prompt, arrival.output_tokens, config.block_size).block_hashes
    return tuple(hashes[config.blocks_per_chunk - 1 :: config.blocks_per_chunk])


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    block_size = draw(st.sampled_from((1, 2, 4, 8, 16)))
    num_blocks = draw(st.integers(3, 48))
    max_model_len = num_blocks * block_size + 1
    chunked = draw(st.sampled_from((True, True, True, False)))
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=draw(st.integers(1, 10)),
        max_num_batched_tokens=draw(st.integers(2, 160)) if chunked else max_model_len + draw(st.integers(0, 64)),
        max_model_len=max_model_len,
        long_prefill_token_threshold=draw(st.sampled_from((0, 0, 1, 5, 16, 33))),
        enable_chunked_prefill=chunked,
        watermark=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))),
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    config = draw(configs())
    longest = config.num_blocks * config.block_size  # prompt and output, less the last token, fill HBM exactly
    step = 0
    arrivals: list[Arrival] = []
    for i in range(draw(st.integers(2, 14))):
        step += draw(st.sampled_from((0, 0, 0, 1, 2, 7)))
        group, shared = draw(st.integers(0, 2)), draw(st.integers(0, max(1, longest // 2)))
        # Some prompts are nothing but the shared part, some of whole blocks: then all of it may be cached.
        own = draw(st.integers(0, max(1, longest // 3))) if draw(st.sampled_from((True, True, False))) else 0
        if own == 0:
            shared = max(1, shared // config.block_size * config.block_size)
        prompt = [1000 * (group + 1) + j for j in range(shared)] + [10_000 * (i + 1) + j for j in range(own)]
        prompt = prompt[: longest - 1]
        output = draw(st.integers(1, min(60, longest + 1 - len(prompt))))
        abort_after = draw(st.sampled_from((None, None, None, None, None, None, 0, 3, 11)))
        arrivals.append(Arrival(step, tuple(prompt), output, abort_after))
    return Workload(config, tuple(arrivals))


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    slow = draw(st.sampled_from((0, 1, 4, 12)))
    steps = st.lists(st.integers(0, slow), min_size=1, max_size=6).map(tuple)
    comes = st.sampled_from((None, None, None, 0, 1, 3))
    return Script(
        moves=draw(steps),
        ranks=draw(st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)),
        fetches=draw(st.lists(st.tuples(st.integers(0, slow), comes), min_size=1, max_size=6).map(tuple)),
        puts=draw(steps),
        lookups=draw(steps),
        stored=draw(st.lists(st.sampled_from((0, 0, 1, 3, 50)), min_size=1, max_size=5).map(tuple)),
        evictions=draw(st.dictionaries(st.integers(3, 60), st.integers(0, 2), max_size=3)),
    )


@st.composite
def tiered_workloads(draw: st.DrawFn, admission: DramAdmission) -> TieredWorkload:
    blocks_per_chunk = draw(st.integers(1, 4))
    base = draw(configs())
    config = replace(
        base,
        mode=draw(st.sampled_from((OffloadMode.NATIVE, OffloadMode.SHARED, OffloadMode.SHARED))),
        blocks_per_chunk=blocks_per_chunk,
        dram_chunks=draw(st.sampled_from((1, 2, 3, 5, 8, 13, 24, 200))),
        chunk_bytes=1_000,
        offload_prompt_only=draw(st.booleans()),
        dram_admission=admission,
    )
    longest = config.num_blocks * config.block_size
    step = 0
    arrivals: list[Arrival] = []
    for i in range(draw(st.integers(3, 9))):
        step += draw(st.sampled_from((0, 0, 0, 1, 2, 5, 14)))
        group, shared = draw(st.integers(0, 2)), draw(st.integers(0, max(1, longest * 2 // 3)))
        own = draw(st.integers(0, max(1, longest // 3))) if draw(st.sampled_from((True, True, False))) else 0
        if own == 0:
            shared = max(1, shared // config.block_size * config.block_size)
        prompt = [1000 * (group + 1) + j for j in range(shared)] + [10_000 * (i + 1) + j for j in range(own)]
        prompt = prompt[: longest - 1]
        if len(prompt) == 1 and config.block_size * blocks_per_chunk == 1:
            prompt = [10_000, 10_001]  # vLLM would load a prompt of one token for ever
        output = draw(st.integers(1, max(1, min(24, longest + 1 - len(prompt)))))
        abort_after = draw(st.sampled_from((None, None, None, None, None, None, 0, 3, 11)))
        arrivals.append(Arrival(step, tuple(prompt), output, abort_after))
    return TieredWorkload(config, tuple(arrivals), draw(scripts()))
