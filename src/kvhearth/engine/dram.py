"""The engine's own DRAM tier: which chunks it holds, which of them are busy, and which goes next.

Keys only; bytes are the business of whoever answers the `Transfers` port. Follows the LRU policy of vLLM 0.32's CPU
tier (``vllm/v1/kv_offload/cpu/``): insertion and the end of a request count as use, a transfer does not, so a long
prompt's saves can push out the chunks of its own that it loaded before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from kvhearth.engine.validate import ensure

_WRITING = -1


class Lead(NamedTuple):
    """``ready`` leading keys can be read now; ``pending``: the next one is being written."""

    ready: int
    pending: bool


class DramTier:
    """At most ``capacity`` chunks. A chunk is being written, or ready with a number of readers; an idle one has none.

    Only idle chunks are ever evicted, so what a transfer touches stays. Without an idle chunk nothing more fits, and
    the caller goes without: nobody waits for room here.
    """

    __slots__ = ("_idle", "_readers", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._readers: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._idle = 0

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, key: int) -> bool:
        return key in self._readers

    @property
    def room(self) -> int:
        """Chunks that could be written now: unused, or idle."""
        return self.capacity - len(self._readers) + self._idle

    def lead(self, keys: Iterable[int]) -> Lead:
        """How many leading ``keys`` can be read."""
        readers = self._readers
        ready = 0
        for key in keys:
            count = readers.get(key)
            if count is None:
                return Lead(ready, pending=False)
            if count == _WRITING:
                return Lead(ready, pending=True)
            ready += 1
        return Lead(ready, pending=False)

    def reserve(self, keys: Sequence[int], protect: Set[int]) -> int:
        """Make room for the leading ``keys`` (none is held) that fit, mark them as being written, return their number.

        Evicts idle chunks, least recently used first, but none of ``protect``.
        """
        missing = len(keys) - (self.capacity - len(self._readers))
        if missing > 0 and self._idle:
            victims: list[int] = []
            for key, count in self._readers.items():
                if count == 0 and key not in protect:
                    victims.append(key)
                    if len(victims) == missing:
                        break
            for key in victims:
                del self._readers[key]
            self._idle -= len(victims)
        fit = min(len(keys), self.capacity - len(self._readers))
        for key in keys[:fit]:
            self._readers[key] = _WRITING
        return fit

    def written(self, keys: Sequence[int], keys_ok: int) -> None:
        """The write of ``keys`` is over: the leading ``keys_ok`` are ready and idle, the rest are gone."""
        for key in keys[:keys_ok]:
            self._readers[key] = 0
        for key in keys[keys_ok:]:
            del self._readers[key]
        self._idle += keys_ok

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

    def drop(self, keys: Iterable[int]) -> None:
        """Forget those chunks that are idle."""
        for key in keys:
            if self._readers.get(key) == 0:
                del self._readers[key]
                self._idle -= 1

    def clear(self) -> bool:
        """Forget everything. False, and nothing done, while a chunk is read or written."""
        if self._idle != len(self._readers):
            return False
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
