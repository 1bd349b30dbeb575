"""Lazy admission to DRAM: which chunks of HBM are being pushed out of it, or are next in line to be.

Decides, saves nothing. Follows ``LazyScheduler`` of `kvhearth.connector.lazy`, which see for why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from kvhearth.engine.block_pool import BlockPool
from kvhearth.engine.ports import EngineConfig
from kvhearth.engine.request import RequestState


class HbmChunk(NamedTuple):
    """A chunk in HBM that may have to be saved.

    Attributes:
        key: its name.
        place: in its request's chain, from 0.
        blocks: where it is.
        hashes: what those blocks hold; anything else there now means that it is gone.
        request: who computed it last.
    """

    key: int
    place: int
    blocks: tuple[int, ...]
    hashes: tuple[int, ...]
    request: RequestState


class LazyAdmission:
    """Chunks of one engine's HBM, known by their blocks. Without prefix caching no block holds anything known."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._pool = pool
        self._size = config.blocks_per_chunk
        self._caching = config.enable_prefix_caching
        self._chunk_of: dict[int, HbmChunk] = {}
        # vLLM counts its null block too.
        few = (config.num_blocks + 1) // 8
        self._ahead = max(1, min(config.max_num_batched_tokens // config.block_size, few))
        self._handed_out = 0

    def note(self, request: RequestState, first: int, end: int) -> None:
        """The request's chunks ``first`` to ``end`` are whole, and their blocks published."""
        if not self._caching:
            return
        for place in range(first, end):
            blocks = tuple(request.blocks[place * self._size : (place + 1) * self._size])
            hashes = request.hashes[place * self._size : (place + 1) * self._size]
            chunk = HbmChunk(hashes[-1], place, blocks, hashes, request)
            self._chunk_of.update(dict.fromkeys(blocks, chunk))

    def pushed_out(self, handed_out: Collection[int]) -> list[list[HbmChunk]]:
        """Chunks of which this step took a block; until it computes, all of them is still there. Each list is one
        request's, in chain order."""
        found: dict[int, HbmChunk] = {}
        gone: list[int] = []
        for block in sorted(handed_out):
            chunk = self._chunk_of.get(block)
            if chunk is None or self._intact(chunk, block):
                continue  # never noted, or a prefix hit
            gone.append(block)
            if all(self._holds(chunk, other, handed_out) for other in chunk.blocks):
                found[chunk.key] = chunk
        for block in gone:
            del self._chunk_of[block]
        self._handed_out += len(handed_out)
        return _by_request(found.values())

    def next_in_line(self) -> list[list[HbmChunk]]:
        """Chunks whose blocks will be handed out next; looks only once enough blocks were handed out since it did."""
        if 2 * self._handed_out < self._ahead:
            return []
        self._handed_out = 0
        found: dict[int, HbmChunk] = {}
        for block in self._pool.first_free(self._ahead):
            chunk = self._chunk_of.get(block)
            if chunk is not None and all(self._holds(chunk, other, ()) for other in chunk.blocks):
                found[chunk.key] = chunk
        return _by_request(found.values())

    def _holds(self, chunk: HbmChunk, block: int, handed_out: Collection[int]) -> bool:
        """Whether a block still has the chunk's KV: nothing else was noted of it since, and it is either in the prefix
        cache as it was, or was handed out in this very step."""
        return self._chunk_of.get(block) is chunk and (block in handed_out or self._intact(chunk, block))

    def _intact(self, chunk: HbmChunk, block: int) -> bool:
        return self._pool.content(block) == chunk.hashes[chunk.blocks.index(block)]


def _by_request(chunks: Iterable[HbmChunk]) -> list[list[HbmChunk]]:
    groups: dict[RequestState, list[HbmChunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.request, []).append(chunk)
    return [sorted(group, key=lambda chunk: chunk.place) for group in groups.values()]
