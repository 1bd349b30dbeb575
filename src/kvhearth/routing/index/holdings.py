"""Which key is held where, within a bound: masks by key, a table of engine hashes a place, guesses, and eviction. What
an event means is `index`'s to say.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from kvhearth.routing.index.places import Place, Target
from kvhearth.routing.index.table import HashTable

USED = 1
"""The mask bit of a key that a request asked for since it was last considered for eviction."""

_BATCHES_OF_ROOM = 256
"""Eviction frees 1/256 of the room at a time, so that it need not look for the largest place on every event."""

_MOST_SHARED = 8192

_MASK_BYTES = 70
"""A dict whose keys come and go makes room for three to six times as many as it has, some 60 to 120 bytes a key; past
this its memory is given back."""


class Holdings:
    """State of the index.

    ``masks`` maps own key → the bits of the places that hold it. A place's own table finds the key of an engine's hash,
    so that what an owner loses takes time by its own blocks.

    Args:
        room: holders, and guesses as often as they are made, at most.
        known: engine hashes at most whose keys are remembered though nobody holds them now.
        places: all places that there are now.
        dropped: counts what was evicted, as ``evicted`` and ``guess_evicted``.
    """

    def __init__(self, room: int, known: int, places: Callable[[], Iterable[Place]], dropped: Counter[str]) -> None:
        self.masks: dict[int, int] = {}
        self.size = 0
        self.guesses = 0
        self._room = room
        self._batch = max(1, room // _BATCHES_OF_ROOM)
        self._most_known = known
        self._known = HashTable()
        self._places = places
        self._dropped = dropped
        self._guessed: deque[tuple[float, Target, Sequence[int]]] = deque()
        self._listed = 0  # keys in ``_guessed``: one that is guessed again is listed again
        self._shared: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of keys, masks and what is remembered; places have their own."""
        listed = 8 * self._listed + 32 * max(0, self._listed - self.guesses)
        return sys.getsizeof(self.masks) + 32 * len(self.masks) + listed + self._known.nbytes

    @property
    def _over(self) -> bool:
        return self.size + self._listed > self._room

    # Blocks that are held.

    def hold(self, place: Place, hash_: int, key: int) -> None:
        """The place holds the key, which its owner calls ``hash_``."""
        if not place.blocks.add(hash_, key):
            self.size += 1
            self._mark(key, place.bit)

    def hold_run(self, owner: Target, hashes: Sequence[int], keys: Sequence[int]) -> None:
        """The target holds a run of blocks in HBM; guesses of them are thereby settled. The last counts as the oldest,
        for without it those before it are still worth something."""
        add, bit, masks, shared = owner.hbm.blocks.add, owner.hbm.bit, self.masks, self._shared
        if owner.guesses:
            for key in keys:
                self._settle(owner, key)
        for at in range(len(keys) - 1, -1, -1):
            key = keys[at]
            if not add(hashes[at], key):
                self.size += 1
                mask = masks.get(key, 0) | bit
                masks[key] = shared.get(mask) or self._share(mask)

    def release(self, place: Place, hash_: int) -> bool:
        """The place holds it no more; False = it did not."""
        key = place.blocks.pop(hash_)
        if not key:
            return False
        self.size -= 1
        self._unmark(key, place.bit)
        self.remember(hash_, key)
        return True

    def empty(self, place: Place) -> None:
        for hash_, key in place.blocks.items():
            self._unmark(key, place.bit)
            self.remember(hash_, key)
        self.size -= len(place.blocks)
        place.blocks.clear()

    def remember(self, hash_: int, key: int) -> None:
        """Keep the meaning of a hash for a while: other media may still hold it, or be told of late."""
        self._known.add(hash_, key)
        if len(self._known) > self._most_known:
            self._known.pop_oldest()

    def remembered(self, hash_: int) -> int:
        """Key of a hash that was held lately, or 0."""
        return self._known.get(hash_)

    # Blocks that are guessed.

    def guess(self, owner: Target, keys: Sequence[int], expires: float) -> None:
        """The target will hold these in HBM; believed until ``expires``. Those that it holds are marked as used."""
        masks, guesses, held = self.masks, owner.guesses, owner.hbm.bit
        guessed = []
        for key in keys:
            mask = masks.get(key, 0)
            if mask & held:
                if not mask & USED:
                    self._mark(key, USED)
                continue
            if key not in guesses:
                self.guesses += 1
                self._mark(key, owner.guess_bit | USED)
            guesses[key] = expires
            guessed.append(key)
        if guessed:
            self._guessed.append((expires, owner, guessed))
            self._listed += len(guessed)
        if sys.getsizeof(guesses) > _MASK_BYTES * len(guesses) + 4096:
            owner.guesses = dict(guesses)

    def expire(self, now: float) -> None:
        while self._guessed and self._guessed[0][0] <= now:
            self._drop_guesses()

    def drop_guesses_of(self, owner: Target) -> None:
        for key in owner.guesses:
            self._unmark(key, owner.guess_bit)
        self.guesses -= len(owner.guesses)
        owner.guesses.clear()

    def _drop_guesses(self) -> int:
        expires, owner, keys = self._guessed.popleft()
        self._listed -= len(keys)
        dropped = 0
        for key in keys:
            if owner.guesses.get(key) == expires:
                self._settle(owner, key)
                dropped += 1
        return dropped

    def _settle(self, owner: Target, key: int) -> None:
        if owner.guesses.pop(key, None) is not None:
            self.guesses -= 1
            self._unmark(key, owner.guess_bit)

    # The bound.

    def make_room(self) -> None:
        """Evict until what is held and guessed fits: the oldest guesses, then blocks of the place that has most."""
        if sys.getsizeof(self.masks) > _MASK_BYTES * len(self.masks) + 4096:
            self.masks = dict(self.masks)  # CPython makes the copy as small as it can
        while self._over and self._guessed:
            self._dropped["guess_evicted"] += self._drop_guesses()
        while self._over:
            self._evict(max(self._places(), key=_blocks))

    def _evict(self, place: Place) -> None:
        """The least recently stored go; what requests asked for since gets a second chance, as long as that does not
        take too long."""
        blocks, masks = place.blocks, self.masks
        chances = 4 * self._batch
        wanted = min(self._batch, len(blocks))
        while wanted:
            hash_, key = blocks.pop_oldest()
            if chances and masks.get(key, 0) & USED:
                chances -= 1
                self._unmark(key, USED)
                blocks.add(hash_, key)
                continue
            self.size -= 1
            self._unmark(key, place.bit)
            self.remember(hash_, key)
            self._dropped["evicted"] += 1
            wanted -= 1

    # Masks. Equal ones are one object, since most blocks have one of few.

    def _mark(self, key: int, bits: int) -> None:
        mask = self.masks.get(key, 0) | bits
        self.masks[key] = self._shared.get(mask) or self._share(mask)

    def _unmark(self, key: int, bits: int) -> None:
        mask = self.masks.get(key, 0) & ~bits
        if mask > USED:
            self.masks[key] = self._shared.get(mask) or self._share(mask)
        else:
            self.masks.pop(key, None)

    def _share(self, mask: int) -> int:
        if len(self._shared) >= _MOST_SHARED:
            self._shared.clear()
        self._shared[mask] = mask
        return mask


def _blocks(place: Place) -> int:
    return len(place.blocks)
