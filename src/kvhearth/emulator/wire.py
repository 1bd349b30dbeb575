"""KV events on the wire, as vLLM 0.32 sends them (``vllm/distributed/kv_events.py``): shapes only.

A batch is the array ``[ts, events, data_parallel_rank]`` in msgpack, an event a map whose ``type`` names it; fields at
their defaults are left out.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks, consecutive ones after ``parent_block_hash``, that can be found in ``medium`` from now on.

    A chunk in CPU or STORAGE of which nothing more is known has no tokens and a block size of 0.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks, or chunks by the hash of their last block, that are gone from ``medium``."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """HBM was emptied."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one engine step changed. ``ts`` in seconds since 1970, by the wall clock."""

    ts: float
    events: list[Event]
    data_parallel_rank: int
