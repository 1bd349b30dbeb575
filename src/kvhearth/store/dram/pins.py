"""Which slots are kept from eviction, and until when. Bounded, and each pin ends by itself, so that whoever pinned and
is gone keeps nothing for ever.
"""

from __future__ import annotations

from collections.abc import Mapping


class Pins:
    """Pins by slot. Not thread-safe. Times are monotonic seconds.

    Args:
        max_pages: pages that pinned values may take together.
        max_items: how many there may be.
    """

    def __init__(self, max_pages: int, max_items: int) -> None:
        self.max_pages = max_pages
        self.max_items = max_items
        self.pages = 0
        self._until: dict[int, float] = {}
        self._pages_of: dict[int, int] = {}

    def __contains__(self, slot: int) -> bool:
        return slot in self._until

    def until(self, slot: int) -> float | None:
        """When the pin on a slot ends; None: there is none."""
        return self._until.get(slot)

    def holds(self, slot: int, now: float) -> bool:
        """Whether a slot is to be kept; a pin that has ended is dropped."""
        until = self._until.get(slot)
        if until is None:
            return False
        if until > now:
            return True
        self.drop(slot)
        return False

    def add(self, pages_of: Mapping[int, int], until: float, now: float) -> bool:
        """Keep slots of so many pages each until then, or as long as they are kept already. False, and nothing changes,
        when that would be over a bound."""
        for slot in [slot for slot, end in self._until.items() if end <= now]:
            self.drop(slot)
        new = [slot for slot in pages_of if slot not in self._until]
        pages = sum(pages_of[slot] for slot in new)
        if self.pages + pages > self.max_pages or len(self._until) + len(new) > self.max_items:
            return False
        for slot in new:
            self._pages_of[slot] = pages_of[slot]
        self.pages += pages
        for slot in pages_of:
            self._until[slot] = max(until, self._until.get(slot, 0.0))
        return True

    def drop(self, slot: int) -> bool:
        """Keep a slot no more; whether it was."""
        if self._until.pop(slot, None) is None:
            return False
        self.pages -= self._pages_of.pop(slot)
        return True
