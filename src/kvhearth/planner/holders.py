"""What the simulated router knows of where KV lies: exactly, at once (`ClusterHolders`), or what the router's own index
makes of the engines' events (`IndexHolders`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvhearth.engine import EngineModel
from kvhearth.engine.ports import KvEvent, KvTier
from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.ports import Hits

_SPELT_TOKENS = 2
_MEDIA = {KvTier.HBM: Medium.HBM, KvTier.DRAM: Medium.DRAM}
_POOL = ""


class ClusterHolders:
    """`routing.ports.Holders` over engine models; keys are the engines' own block hashes.

    Args:
        models: by target.
        in_store: how many leading chunk keys the store holds.
    """

    def __init__(self, models: Mapping[str, EngineModel], in_store: Callable[[Sequence[int]], int]) -> None:
        self._models = models
        self._in_store = in_store
        self._coming: dict[str, Counter[int]] = {name: Counter() for name in models}

    def keys(self, chain: Sequence[int]) -> Sequence[int]:
        """Block keys of a prompt whose blocks the engines name by ``chain``: the same."""
        return chain

    def told(self, target: str, events: Iterable[KvEvent], chain_of: Callable[[str], Sequence[int]]) -> None:
        """Nothing to learn from events: the engines themselves are asked."""

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        """See `routing.ports.Holders`."""
        return [self._match(keys, target) for target in targets]

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        """See `routing.ports.Holders`; until `settle`."""
        self._coming[target].update(keys)

    def settle(self, target: str, keys: Sequence[int]) -> None:
        """What was announced by `speculate` is computed: from now on the engine itself says what it holds."""
        coming = self._coming[target]
        for key in keys:
            if coming[key] > 1:
                coming[key] -= 1
            else:
                del coming[key]

    def silence(self, target: str) -> str:
        """See `routing.ports.Holders`."""
        return ""

    def _match(self, keys: Sequence[int], target: str) -> Hits:
        model, coming = self._models[target], self._coming[target]
        hbm = model.held_in_hbm(keys)
        while hbm < len(keys) and keys[hbm] in coming:
            hbm += 1
        size = model.config.blocks_per_chunk
        chunks = keys[size - 1 :: size]
        first = hbm // size
        in_dram = first + model.held_in_dram(chunks[first:])
        in_store = in_dram + self._in_store(chunks[in_dram:])
        dram = max(0, in_dram * size - hbm)
        return Hits(hbm, dram, max(0, in_store * size - hbm) - dram)


class IndexHolders:
    """`routing.ports.Holders` over the router's index, fed with the events of engine models (``tell_events``).

    Simulated content has no token ids. A block stands in the index as two of them that spell its hash, so that equal
    hashes, and nothing else, get equal keys.

    Args:
        max_bytes: the index's bound.
        now: seconds of the simulation.
        blocks_per_chunk: of the engines.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float], blocks_per_chunk: int) -> None:
        self.index = KvIndex(max_bytes=max_bytes, now=now)
        self._chunk_blocks = blocks_per_chunk
        self.match = self.index.match
        self.speculate = self.index.speculate
        self.silence = self.index.silence

    def keys(self, chain: Sequence[int]) -> Sequence[int]:
        """Block keys of a prompt whose blocks the engines name by ``chain``."""
        return block_keys(_spelt(chain), _SPELT_TOKENS, chain_seed())

    def settle(self, target: str, keys: Sequence[int]) -> None:
        """Nothing to do: the index forgets what was announced after a while."""

    def told(self, target: str, events: Iterable[KvEvent], chain_of: Callable[[str], Sequence[int]]) -> None:
        """What entered and left an engine's tiers, and what it put into the store.

        Args:
            chain_of: from a request's id to the hashes of all its blocks.
        """
        for event in events:
            if event.tier is KvTier.STORE:
                self.index.store_put(_POOL, event.keys, self._chunk_blocks)
            elif not event.keys:
                self.index.cleared(target, _MEDIA[event.tier])
            elif not event.stored:
                self.index.removed(target, _MEDIA[event.tier], event.keys)
            elif event.tier is KvTier.DRAM:
                self.index.stored(target, Medium.DRAM, StoredBlocks(event.keys, chunk_blocks=self._chunk_blocks))
            else:
                parent = chain_of(event.request_id)[event.first - 1] if event.first else None
                spelt = _spelt(event.keys)
                self.index.stored(target, Medium.HBM, StoredBlocks(event.keys, parent, spelt, _SPELT_TOKENS))

    def evicted(self, keys: Sequence[int]) -> None:
        """The store dropped these chunks."""
        self.index.store_evicted(_POOL, keys)


def _spelt(chain: Sequence[int]) -> list[int]:
    return [part for block in chain for part in (block >> 32, block & 0xFFFF_FFFF)]
