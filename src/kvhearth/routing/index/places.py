"""Where blocks can be held: a target's HBM and DRAM, and the store of a pool. Plain state; `index` has the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhearth.routing.index.parking import Parked
from kvhearth.routing.index.table import HashTable


@dataclass(slots=True, eq=False)
class Place:
    """One medium of one owner. ``bit`` marks it in the index's masks; ``blocks`` maps engine hash → own key. With
    chunks, the last block of a chunk stands for all of it: it alone is held here, and ``chunk_blocks`` says how many
    it means.
    """

    bit: int
    blocks: HashTable = field(default_factory=HashTable)
    chunk_blocks: int = 1


@dataclass(slots=True, eq=False)
class Pool:
    """Targets that share a store. ``fed``: the store's own feed tells what it holds, so engines' word on it is not
    taken."""

    name: str
    number: int
    store: Place
    targets: dict[str, Target] = field(default_factory=dict)
    parked: Parked = field(default_factory=Parked)
    fed: bool = False


@dataclass(slots=True, eq=False)
class Target:
    """An engine or one rank of it.

    ``guesses`` maps own keys that a request sent there should bring into HBM → when we stop to believe it;
    ``guess_bit`` marks them, one above HBM's bit. ``kv_group`` is the KV cache group that counts (None = not told yet:
    group 0). ``silence`` says why nothing is known ("" = it is).
    """

    name: str
    number: int
    pool: Pool
    hbm: Place
    dram: Place
    guess_bit: int
    guesses: dict[int, float] = field(default_factory=dict)
    parked: Parked = field(default_factory=Parked)
    kv_group: int | None = None
    silence: str = "no_events"

    @property
    def places(self) -> tuple[Place, Place]:
        return self.hbm, self.dram
