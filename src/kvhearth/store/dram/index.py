"""Which chunk is in which slot, in some 220 bytes a chunk: a dictionary from keys to slots and numpy columns by slot.
It knows no bytes of values and decides nothing.
"""

from __future__ import annotations

import xxhash

from kvhearth.store.policies.facts import Facts


class Index:
    """Keys and slots. Not thread-safe.

    Args:
        slots: most chunks held at once.
    """

    def __init__(self, slots: int) -> None:
        self.facts = Facts(slots)
        self.slot_of: dict[bytes, int] = {}
        self._keys: list[bytes | None] = []
        self._unused: list[int] = []

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def top(self) -> int:
        """Slots from here on have never been used."""
        return len(self._keys)

    def take(self, key: bytes) -> int | None:
        """A slot for ``key``, which has none; None when there is none left. The facts but `Facts.fingerprint` are the
        caller's to write."""
        if self._unused:
            slot = self._unused.pop()
            self._keys[slot] = key
        elif len(self._keys) < self.facts.capacity:
            slot = len(self._keys)
            self._keys.append(key)
        else:
            return None
        self.slot_of[key] = slot
        self.facts.fingerprint[slot] = fingerprint_of(key)
        return slot

    def key_of(self, slot: int) -> bytes:
        """The key in a slot that is held (or was, and has not been given back)."""
        key = self._keys[slot]
        if key is None:
            raise KeyError(slot)
        return key

    def hide(self, slot: int) -> None:
        """The key has no slot any more; the slot is not reused before `give_back`."""
        del self.slot_of[self.key_of(slot)]

    def give_back(self, slot: int) -> None:
        """A hidden slot may be reused."""
        self._keys[slot] = None
        self._unused.append(slot)

    def keys_from(self, slot: int, most: int) -> tuple[list[bytes], int]:
        """Keys in at most ``most`` slots from ``slot`` on, and where to go on; 0 at the end."""
        stop = min(slot + most, len(self._keys))
        keys = enumerate(self._keys[slot:stop], slot)
        found = [key for at, key in keys if key is not None and self.slot_of.get(key) == at]
        return found, stop if stop < len(self._keys) else 0


def fingerprint_of(key: bytes) -> int:
    """xxh3-64 of a key, never 0."""
    return xxhash.xxh3_64_intdigest(key) or 1
