"""vLLM's KV events as they are on the wire, made into what the index takes. A decoder only: order and loss are the
feed's business. Format: ``vllm/distributed/kv_events.py``, 0.32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from kvhearth.router.feeds.ports import Index
from kvhearth.routing.chain import split_extra_keys
from kvhearth.routing.index import Medium, StoredBlocks

BlockHash: TypeAlias = int | bytes
"""An integer below 2**64, or whole where the engine has ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0``."""

_ELSEWHERE = "REMOTE"


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks of one chain are there; fields that are not listed do not matter here."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """Blocks are there no more."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """The prefix cache was reset."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_raw_batch = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_event: Any = msgspec.msgpack.Decoder(Event).decode


class Batch(NamedTuple):
    """What an engine's step did. ``at`` is the engine's wall clock in seconds; ``unread`` counts events of a kind or a
    shape that this version does not know, which are left out."""

    at: float
    events: Sequence[Event]
    unread: int = 0


def decode(payload: bytes) -> Batch:
    """One batch of events.

    Raises:
        ValueError: it is none. One event that cannot be read does not make a batch unreadable.
    """
    try:
        batch = _decode_batch(payload)
        return Batch(_checked(batch.ts), batch.events)
    except (msgspec.ValidationError, RecursionError):
        pass
    except msgspec.DecodeError as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    try:
        raw = _decode_raw_batch(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None
    events: list[Event] = []
    for one in raw.events:
        try:
            events.append(_decode_event(one))
        except (msgspec.DecodeError, RecursionError):
            continue
    return Batch(_checked(raw.ts), events, len(raw.events) - len(events))


def _checked(at: float) -> float:
    """A time after which no other can come would hide every later start of the engine."""
    if not math.isfinite(at):
        raise ValueError(f"not a batch of KV events: its time is {at}")
    return at


def apply(event: Event, target: str, index: Index, *, whole: bool = False) -> str:
    """Tell the index what happened to the target; why the event is worth nothing, or "" when it was told.

    Args:
        whole: the event is of a snapshot, where DRAM's events have their extra keys as HBM's do. vLLM's own leave them
            out, so that a salted chunk looks like one that is not: a chunk goes by its hash then, which HBM's event has
            explained.
    """
    if isinstance(event, AllBlocksCleared):
        index.cleared(target)
        return ""
    medium = Medium.named(event.medium)
    if medium is None:
        return "unknown_medium"
    if event.locality == _ELSEWHERE and medium is not Medium.STORE:
        return "remote"
    if isinstance(event, BlockRemoved):
        index.removed(target, medium, short_hashes(event.block_hashes), event.group_idx or 0)
        return ""
    if not event.token_ids or (medium is not Medium.HBM and not whole):
        index.stored(target, medium, _by_name(event))
        return ""
    lora = event.lora_name or (f"#{event.lora_id}" if event.lora_id else "")
    salt, extra_keys = split_extra_keys(event.extra_keys, lora) if event.extra_keys else ("", None)
    parent = event.parent_block_hash
    index.stored(
        target,
        medium,
        StoredBlocks(
            hashes=short_hashes(event.block_hashes),
            parent=short_hash(parent) if parent is not None else None,
            token_ids=event.token_ids,
            block_tokens=event.block_size,
            lora=lora,
            salt=salt,
            extra_keys=extra_keys,
            kv_group=event.group_idx or 0,
            kv_kind=event.kv_cache_spec_kind or "",
        ),
    )
    return ""


def _by_name(event: BlockStored) -> StoredBlocks:
    """A chunk goes by its last block. A described event is one chunk; a placeholder does not say how long it is."""
    return StoredBlocks(
        hashes=short_hashes(event.block_hashes)[-1:],
        kv_group=event.group_idx or 0,
        kv_kind=event.kv_cache_spec_kind or "",
        chunk_blocks=len(event.block_hashes) if event.token_ids else 0,
    )


def short_hash(block_hash: BlockHash) -> int:
    """64 bits of a hash, as vLLM's ``maybe_convert_block_hash`` cuts them: the last eight bytes, big-endian."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


def short_hashes(hashes: list[BlockHash]) -> list[int]:
    """`short_hash` of each. An engine sends one kind of hash only, so mostly this is a look at the first."""
    if not hashes or all(type(one) is int for one in hashes):
        return hashes  # type: ignore[return-value]
    return [short_hash(one) for one in hashes]
