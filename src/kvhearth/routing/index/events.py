"""What the index is told: media and stored blocks, as vLLM's KV events mean them. Decoding is the feeds' work."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Medium(Enum):
    """Where KV lies; the values are vLLM's names."""

    HBM = "GPU"
    DRAM = "CPU"
    STORE = "STORAGE"

    @classmethod
    def named(cls, name: str | None) -> Medium | None:
        """The medium that an event names; None = unknown, worth nothing. Engines before media say nothing: HBM."""
        return _BY_NAME.get(name)


_BY_NAME: dict[str | None, Medium] = {None: Medium.HBM, **{medium.value: medium for medium in Medium}}


FULL_ATTENTION = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache group (vLLM's ``kv_cache_spec_kind``) that keep all of a prefix; "" = not said."""


class StoredBlocks(NamedTuple):
    """Blocks of one chain, one after the other, that a target now holds.

    Attributes:
        hashes: the engine's block hashes, integers in [0, 2**64) (vLLM's ``maybe_convert_block_hash``).
        parent: hash of the block before the first; None = they begin a prompt.
        token_ids: ``len(hashes) * block_tokens`` of them; empty = a placeholder, whose hashes are resolved by what is
            known of them (vLLM's offload events without ``self_describing_kv_events``).
        block_tokens: tokens a block; 0 in placeholders.
        lora: adapter's name, "" = the base model; counts where ``parent`` is None.
        salt: ``cache_salt``, "" = none; likewise.
        extra_keys: per block what `routing.chain.split_extra_keys` leaves, or None.
        kv_group: vLLM's KV cache group. Only one of them, of full attention, tells how far a prefix reaches.
        kv_kind: vLLM's ``kv_cache_spec_kind`` of that group, "" = not said. The first group named of a kind in
            `FULL_ATTENTION` counts, group 0 where none was named; sliding windows and states are worth nothing.
        chunk_blocks: blocks a chunk, for DRAM and store; 0 = not known: a described event is one chunk, and a
            placeholder's chunks are as long as the last one described.
    """

    hashes: Sequence[int]
    parent: int | None = None
    token_ids: Sequence[int] = ()
    block_tokens: int = 0
    lora: str = ""
    salt: str = ""
    extra_keys: Sequence[object] | None = None
    kv_group: int = 0
    kv_kind: str = ""
    chunk_blocks: int = 0
