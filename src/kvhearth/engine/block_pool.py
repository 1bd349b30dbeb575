"""HBM as vLLM V1 keeps it: blocks with reference counts, a free list in eviction order, and the prefix cache.

It knows blocks and hashes, not requests. The order of the free list follows vLLM 0.32's ``BlockPool`` to the block
(``vllm/v1/core/block_pool.py``), because that order decides what the prefix cache still holds later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvhearth.engine.ports import KvEvent, KvTier
from kvhearth.engine.validate import ensure

_NO_HASH = -1


class BlockPool:
    """``num_blocks`` blocks named 0..num_blocks-1.

    A block is free when nothing refers to it; it keeps its hash, and can be hit, until it is handed out again.

    Attributes:
        events: where what the prefix cache gains and loses is noted; None = nowhere.
    """

    __slots__ = ("_cached", "_caching", "_free", "_hash", "_refs", "events", "num_blocks")

    def __init__(self, num_blocks: int, enable_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.events: list[KvEvent] | None = None
        self._caching = enable_caching
        self._refs = [0] * num_blocks
        self._hash = [_NO_HASH] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        # Several blocks can hold the same content (nothing is deduplicated after the fact); the oldest copy is hit.
        self._cached: dict[int, int | dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that something refers to."""
        return self.num_blocks - len(self._free)

    def content(self, block: int) -> int | None:
        """Hash of what the prefix cache would find in the block."""
        key = self._hash[block]
        return None if key == _NO_HASH else key

    def first_free(self, count: int) -> list[int]:
        """The blocks that would be handed out next, at most ``count``."""
        return list(islice(self._free, count))

    def longest_hit(self, hashes: Sequence[int], limit: int) -> list[int]:
        """The cached blocks of the longest leading run of ``hashes``, at most ``limit`` of them."""
        hit: list[int] = []
        cached = self._cached
        if not cached:
            return hit
        for i in range(limit):
            block = cached.get(hashes[i])
            if block is None:
                break
            hit.append(block if isinstance(block, int) else next(iter(block)))
        return hit

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` lie in the free list: taking them uses up free blocks too."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def take(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, hit or already in use."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._free[block]
            refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out the ``count`` blocks that are first in eviction order; what they cached is forgotten.

        Raises:
            KeyError: fewer than ``count`` are free (the caller checks ``num_free``).
        """
        blocks: list[int] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            if self._hash[block] != _NO_HASH:
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def publish(self, blocks: Sequence[int], hashes: Sequence[int], start: int, end: int, request_id: str = "") -> None:
        """Let the prefix cache find ``blocks[start:end]`` under ``hashes[start:end]``; whose they are is noted too."""
        if not self._caching:
            return
        if self.events is not None:
            self.events.append(KvEvent(KvTier.HBM, True, tuple(hashes[start:end]), request_id, start))
        cached = self._cached
        for i in range(start, end):
            key, block = hashes[i], blocks[i]
            self._hash[block] = key
            held = cached.get(key)
            if held is None:
                cached[key] = block
            elif isinstance(held, int):
                cached[key] = {held: None, block: None}
            else:
                held[block] = None

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block, given in the order in which they should be evicted.

        Blocks that become free and cache nothing are reused first, most recent first; the others last.
        """
        refs, free = self._refs, self._free
        nothing_cached: list[int] = []
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                if self._hash[block] == _NO_HASH:
                    nothing_cached.append(block)
                else:
                    free[block] = None
        for block in reversed(nothing_cached):
            free[block] = None
            free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget all cached content. False, and nothing done, while any block is in use."""
        if self.num_used:
            return False
        if self.events is not None:
            self.events.append(KvEvent(KvTier.HBM, False, ()))
        self._cached.clear()
        self._hash = [_NO_HASH] * self.num_blocks
        return True

    def check_integrity(self, references: Iterable[int]) -> None:
        """For tests: ``references`` are all blocks referred to, as often as they are.

        Raises:
            AssertionError: a count, the free list or the cache disagrees.
        """
        want = [0] * self.num_blocks
        for block in references:
            want[block] += 1
        ensure(self._refs == want, "reference counts differ from the references")
        ensure(set(self._free) == {b for b, n in enumerate(want) if n == 0}, "free list differs from the unreferenced")
        copies = {key: {held} if isinstance(held, int) else set(held) for key, held in self._cached.items()}
        ensure(all(copies.values()), "a cached hash without a block")
        listed = {block: key for key, blocks in copies.items() for block in blocks}
        hashed = {block: key for block, key in enumerate(self._hash) if key != _NO_HASH}
        ensure(listed == hashed, "the cache differs from the blocks")

    def _forget(self, block: int) -> None:
        key = self._hash[block]
        if self.events is not None:
            self.events.append(KvEvent(KvTier.HBM, False, (key,)))
        self._hash[block] = _NO_HASH
        held = self._cached[key]
        if isinstance(held, int):
            del self._cached[key]
        else:
            del held[block]
            if not held:
                del self._cached[key]
