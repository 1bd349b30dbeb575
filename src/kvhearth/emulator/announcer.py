"""Tells in vLLM's words what the engine model says of its tiers in its own: adds tokens, parents and extra keys.

No sockets: `publisher` sends what comes out of here.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvhearth.emulator.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvhearth.engine.ports import KvEvent, KvTier

if TYPE_CHECKING:
    from kvhearth.emulator.answers import Answer

MEDIA = {KvTier.HBM: "GPU", KvTier.DRAM: "CPU", KvTier.STORE: "STORAGE"}
MAX_DESCRIBED_TOKENS = 1 << 23
_GROUP = 0
_KIND = "full_attention"


class _Chunk(NamedTuple):
    """What a self-describing event says of a chunk, kept from when its blocks were computed."""

    block_hashes: list[int]
    parent: int | None
    token_ids: array[int]
    lora_id: int | None
    lora_name: str | None


class Announcer:
    """Translator of one engine's events.

    Args:
        block_size: tokens a block.
        blocks_per_chunk: blocks of a chunk.
        self_describing: events of CPU and STORAGE name the chunk's blocks and tokens, as with vLLM's
            ``self_describing_kv_events``; otherwise, as by default there, only its key. The latest chunks, of
            ``MAX_DESCRIBED_TOKENS`` in all, can be described.
    """

    def __init__(self, block_size: int, blocks_per_chunk: int, *, self_describing: bool) -> None:
        self._block_size = block_size
        self._blocks_per_chunk = blocks_per_chunk
        self._self_describing = self_describing
        self._most_chunks = max(1, MAX_DESCRIBED_TOKENS // (block_size * blocks_per_chunk))
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()

    def translate(self, events: Sequence[KvEvent], answers: Mapping[str, Answer]) -> list[Event]:
        """vLLM's events for those of one step; ``answers`` are the open ones by request id."""
        told: list[Event] = []
        for event in events:
            if event.tier is KvTier.HBM:
                told.append(self._of_hbm(event, answers))
            else:
                told += self._of_chunks(event)
        return told

    def forget(self) -> None:
        """The engine lost everything."""
        self._chunks.clear()

    def _of_hbm(self, event: KvEvent, answers: Mapping[str, Answer]) -> Event:
        medium = MEDIA[KvTier.HBM]
        if not event.stored:
            return BlockRemoved(list(event.keys), medium, _GROUP) if event.keys else AllBlocksCleared()
        answer = answers[event.request_id]
        size, first, end = self._block_size, event.first, event.first + len(event.keys)
        adapter, salt = answer.adapter, answer.salt
        lora = () if adapter is None else (adapter.name,)
        extra: list[tuple[str, ...] | None] = [lora or None] * len(event.keys)
        if salt and first == 0:
            extra[0] = (*lora, salt)
        if self._self_describing:
            self._describe(answer, first, end)
        return BlockStored(
            block_hashes=list(event.keys),
            parent_block_hash=answer.request.block_hashes[first - 1] if first else None,
            token_ids=answer.token_ids[first * size : end * size].tolist(),
            block_size=size,
            lora_id=None if adapter is None else adapter.number,
            medium=medium,
            lora_name=None if adapter is None else adapter.name,
            extra_keys=extra,
            group_idx=_GROUP,
            kv_cache_spec_kind=_KIND,
        )

    def _describe(self, answer: Answer, first: int, end: int) -> None:
        """Remember the chunks that the blocks ``first`` to ``end`` complete."""
        per_chunk, size = self._blocks_per_chunk, self._block_size
        hashes, adapter = answer.request.block_hashes, answer.adapter
        for chunk in range(first // per_chunk, end // per_chunk):
            start, stop = chunk * per_chunk, (chunk + 1) * per_chunk
            key = hashes[stop - 1]
            self._chunks[key] = _Chunk(
                list(hashes[start:stop]),
                hashes[start - 1] if start else None,
                answer.token_ids[start * size : stop * size],
                None if adapter is None else adapter.number,
                None if adapter is None else adapter.name,
            )
            self._chunks.move_to_end(key)
        while len(self._chunks) > self._most_chunks:
            self._chunks.popitem(last=False)

    def _of_chunks(self, event: KvEvent) -> Iterator[Event]:
        medium = MEDIA[event.tier]
        if not event.stored:
            # vLLM tells of evictions only: of a DRAM that was emptied as a whole it says nothing.
            hashes = [value for key in event.keys for value in self._hashes(key)]
            if hashes:
                yield BlockRemoved(hashes, medium, _GROUP)
            return
        for key in event.keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                yield BlockStored([key], None, [], 0, None, medium, None, group_idx=_GROUP)
                continue
            yield BlockStored(
                block_hashes=chunk.block_hashes,
                parent_block_hash=chunk.parent,
                token_ids=chunk.token_ids.tolist(),
                block_size=self._block_size,
                lora_id=chunk.lora_id,
                medium=medium,
                lora_name=chunk.lora_name,
                group_idx=_GROUP,
                kv_cache_spec_kind=_KIND,
            )

    def _hashes(self, key: int) -> list[int]:
        chunk = self._chunks.get(key)
        return [key] if chunk is None else chunk.block_hashes
