"""What cannot be placed yet, since it names an engine hash that nobody described: children before their parents, and
hashes without tokens. Whoever owns the index bounds it, by `drop_oldest`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from kvhearth.routing.index.events import Medium, StoredBlocks
from kvhearth.routing.index.table import HashTable

HOLDER_BYTES = 150
"""What one block-holder may cost; `Parked.weight` counts in such units."""


class Orphan(NamedTuple):
    """Blocks whose parent was unknown. ``held``: for each of them, whether it is still held."""

    medium: Medium
    stored: StoredBlocks
    held: list[bool]


@dataclass(slots=True)
class Parked:
    """Of one target or pool.

    Attributes:
        orphans: hash of the unknown parent → its children, oldest first.
        orphaned: by medium, the hashes among the orphans that were not removed since.
        unresolved: by medium, hashes that are held but whose content is not known, oldest first.
        blocks: blocks parked in all.
        weight: their memory, in units of `HOLDER_BYTES`.
    """

    orphans: dict[int, list[tuple[Medium, StoredBlocks]]] = field(default_factory=dict)
    orphaned: dict[Medium, HashTable] = field(default_factory=dict)
    unresolved: dict[Medium, dict[int, None]] = field(default_factory=dict)
    blocks: int = 0
    weight: int = 0

    def add_orphan(self, medium: Medium, stored: StoredBlocks) -> bool:
        """Wait for ``stored.parent``. What comes twice waits once. False = it cannot: not what the events promise."""
        try:  # arrays take a quarter of what lists of ints do
            compact = stored._replace(hashes=array("Q", stored.hashes), token_ids=array("I", stored.token_ids))
        except (OverflowError, TypeError):
            return False
        if stored.parent is None:
            return False
        orphaned = self.orphaned.setdefault(medium, HashTable())
        for hash_ in stored.hashes:
            orphaned.add(hash_, 1)
        waiting = self.orphans.setdefault(stored.parent, [])
        if (medium, compact) not in waiting:
            waiting.append((medium, compact))
            self._count(compact, 1)
        return True

    def add_hash(self, medium: Medium, hash_: int) -> None:
        """Wait for somebody to describe this hash."""
        hashes = self.unresolved.setdefault(medium, {})
        if hash_ not in hashes:
            hashes[hash_] = None
            self.blocks += 1
            self.weight += 1

    def take_orphans(self, parent: int) -> list[Orphan]:
        """The children that waited for this hash."""
        children = []
        for medium, stored in self.orphans.pop(parent, ()):
            self._count(stored, -1)
            pop = self.orphaned[medium].pop
            children.append(Orphan(medium, stored, [pop(hash_) != 0 for hash_ in stored.hashes]))
        return children

    def take_hash(self, hash_: int) -> list[Medium]:
        """The media on which this hash waited to be described."""
        media = [medium for medium, hashes in self.unresolved.items() if hash_ in hashes]
        for medium in media:
            self.remove_hash(medium, hash_)
        return media

    def remove(self, medium: Medium, hash_: int) -> None:
        """The holding ended; if it is parked, it will not be placed."""
        self.remove_hash(medium, hash_)
        if (orphaned := self.orphaned.get(medium)) is not None:
            orphaned.pop(hash_)

    def remove_hash(self, medium: Medium, hash_: int) -> None:
        hashes = self.unresolved.get(medium)
        if hashes and hash_ in hashes:
            del hashes[hash_]
            self.blocks -= 1
            self.weight -= 1

    def drop_oldest(self) -> int:
        """Give up what waited longest, orphans first; how many blocks that were.

        Raises:
            StopIteration: nothing is parked.
        """
        before = self.blocks
        if self.orphans:
            self.take_orphans(next(iter(self.orphans)))
        else:
            medium, hashes = next((medium, hashes) for medium, hashes in self.unresolved.items() if hashes)
            self.remove_hash(medium, next(iter(hashes)))
        return before - self.blocks

    def clear(self, medium: Medium | None = None) -> None:
        """Drop what waits on a medium; None = on all."""
        for parent, children in list(self.orphans.items()):
            for child in children:
                if medium in (None, child[0]):
                    self._count(child[1], -1)
            kept = [child for child in children if medium not in (None, child[0])]
            if kept:
                self.orphans[parent] = kept
            else:
                del self.orphans[parent]
        for one in Medium:
            if medium in (None, one):
                self.orphaned.pop(one, None)
                gone = len(self.unresolved.pop(one, ()))
                self.blocks -= gone
                self.weight -= gone

    def _count(self, stored: StoredBlocks, sign: int) -> None:
        blocks = len(stored.hashes)
        self.blocks += sign * blocks
        self.weight += sign * blocks * (2 + 4 * stored.block_tokens // HOLDER_BYTES)
