"""Which chunks that DRAM has are worth a put: not those the store has, and with second sight not those seen once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_MOST_KNOWN = 1 << 16
_KNOWN_SECONDS = 60.0
_MOST_SEEN = 1 << 18
_REOFFER_SECONDS = 60.0


class StoreAdmission:
    """What an engine remembers of the store; all of it may be wrong, which costs a put or delays one.

    Args:
        second_sight: admit a chunk only when a second request needs it.
        clock: monotonic seconds.
    """

    def __init__(self, *, second_sight: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._second_sight = second_sight
        self._clock = clock
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._seen: OrderedDict[bytes, str] = OrderedDict()
        self._reoffer_until = 0.0

    @property
    def known(self) -> list[bytes]:
        """Names of chunks that the store is thought to have, the latest last."""
        return list(self._known)

    @property
    def wants_whole_requests(self) -> bool:
        """Whether requests should offer also what vLLM has saved before: it may be news to the store."""
        return self._second_sight or self._clock() < self._reoffer_until

    def reason_to_skip(self, name: bytes, req_id: str) -> str | None:
        """None: put it. ``present``: the store has it. ``second_sight``: no second request has needed it yet."""
        known = self._known.get(name)
        if known is not None and self._clock() - known < _KNOWN_SECONDS:
            return "present"
        if not self._second_sight:
            return None
        first = self._seen.get(name)
        if first is None:
            self._seen[name] = req_id
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return "second_sight" if first in (None, req_id) else None

    def has(self, name: bytes) -> None:
        """The store has it, as of now."""
        self._known.pop(name, None)
        self._known[name] = self._clock()
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def lacks(self, name: bytes) -> None:
        """The store does not have it, as of now."""
        self._known.pop(name, None)

    def reoffer(self) -> None:
        """Something was not put that should have been: for a while, requests offer what DRAM holds anew."""
        self._reoffer_until = self._clock() + _REOFFER_SECONDS

    def doubt(self) -> None:
        """A call failed: the store may have come back empty."""
        self._known.clear()
        self.reoffer()

    def forget(self) -> None:
        """Chunks have other names from now on."""
        self._known.clear()
        self._seen.clear()
