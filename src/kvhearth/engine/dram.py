"""The engine's own DRAM tier: which chunks it holds, which of them are busy, and which goes next.

Keys only; bytes are the business of whoever answers the `Transfers` port. Follows the LRU policy of vLLM 0.32's CPU
tier (``vllm/v1/kv_offload/cpu/``): insertion and the end of a request count as use, a transfer does not, so a long
prompt's saves can push out the chunks of its own that it loaded before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from kvhearth.engine.ports import KvEvent, KvTier
from kvhearth.engine.validate import ensure

_WRITING = -1


class DramTier:
    """At most ``capacity`` chunks. A chunk is being written, or ready with a number of readers; an idle one has none.

    Only idle chunks are ever evicted, so what a transfer touches stays. What does not fit as a whole is not taken, and
    the caller goes without: nobody waits for room here.

    Attributes:
        events: where what can be read from now on, and no more, is noted; None = nowhere.
    """

    __slots__ = ("_idle", "_readers", "capacity", "events")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.events: list[KvEvent] | None = None
        self._readers: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._idle = 0

    def __len__(self) -> int:
        return len(self._readers)

    def ready(self, key: int) -> bool | None:
        """Whether the chunk can be read: False while it is being written, None when it is not here."""
        count = self._readers.get(key)
        return None if count is None else count != _WRITING

    def leading(self, keys: Iterable[int]) -> int:
        """How many leading ``keys`` can be read."""
        count = 0
        for key in keys:
            if not self.ready(key):
                break
            count += 1
        return count

    def reserve(self, keys: Collection[int], protect: Collection[int]) -> bool:
        """Make room for ``keys`` (none is held) and mark them as being written. False, and nothing done: no room.

        Evicts idle chunks, least recently used first, but none of ``protect``.
        """
        readers = self._readers
        missing = len(keys) - (self.capacity - len(readers))
        if missing > 0:
            if missing > self._idle:
                return False
            spared = set(protect)
            victims: list[int] = []
            for key, count in readers.items():
                if count == 0 and key not in spared:
                    victims.append(key)
                    if len(victims) == missing:
                        break
            else:
                return False
            for key in victims:
                del readers[key]
            if self.events is not None:
                self.events.append(KvEvent(KvTier.DRAM, False, tuple(victims)))
            self._idle -= missing
        for key in keys:
            readers[key] = _WRITING
        return True

    def written(self, keys: Collection[int]) -> None:
        """The writes of these are over: they are ready, and idle."""
        for key in keys:
            self._readers[key] = 0
        self._idle += len(keys)
        if self.events is not None and keys:
            self.events.append(KvEvent(KvTier.DRAM, True, tuple(keys)))

    def lost(self, keys: Iterable[int]) -> None:
        """The writes of these failed: they are gone."""
        for key in keys:
            del self._readers[key]

    def pin(self, keys: Iterable[int]) -> None:
        """Add a reader to each (ready) chunk."""
        readers = self._readers
        for key in keys:
            if readers[key] == 0:
                self._idle -= 1
            readers[key] += 1

    def unpin(self, keys: Iterable[int]) -> None:
        """Take a reader from each chunk."""
        readers = self._readers
        for key in keys:
            readers[key] -= 1
            if readers[key] == 0:
                self._idle += 1

    def touch(self, keys: Iterable[int]) -> None:
        """Count a use of each chunk that is held, the last one most recent."""
        readers = self._readers
        for key in keys:
            if key in readers:
                readers.move_to_end(key)

    def clear(self) -> bool:
        """Forget everything. False, and nothing done, while a chunk is read or written."""
        if self._idle != len(self._readers):
            return False
        if self.events is not None and self._readers:
            self.events.append(KvEvent(KvTier.DRAM, False, ()))
        self._readers.clear()
        self._idle = 0
        return True

    def check_integrity(self) -> None:
        """For tests.

        Raises:
            AssertionError: the tier is over-full or its count of idle chunks is wrong.
        """
        ensure(len(self._readers) <= self.capacity, "more chunks than capacity")
        ensure(self._idle == sum(1 for n in self._readers.values() if n == 0), "count of idle chunks")
        ensure(all(n >= _WRITING for n in self._readers.values()), "a chunk with negative readers")
