"""The KV index: which target holds which blocks, and how far a prompt would reach there. It is told everything; it
opens no socket and reads no clock but the one it is handed. One thread at a time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from kvhearth.errors import UserError
from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index.events import FULL_ATTENTION, Medium, StoredBlocks
from kvhearth.routing.index.holdings import Holdings
from kvhearth.routing.index.parking import HOLDER_BYTES, Orphan, Parked
from kvhearth.routing.index.places import Place, Pool, Target
from kvhearth.routing.index.runs import leading_hits
from kvhearth.routing.ports import Hits

_LEAST_HOLDERS = 64
_HASH_END = 1 << 64


class KvIndex:
    """Implements `routing.ports.Holders`.

    Of ``max_bytes``, at 150 bytes a block-holder, an eighth is for what is parked, a sixteenth remembers hashes that
    were held lately, and the rest is for holders and guesses. Past it the oldest guesses go first, then blocks of the
    place with the most: the least recently stored, the last of a run before those before it, and last those that
    requests asked for.

    Args:
        max_bytes: bound on the index's memory.
        now: seconds, never going back.
        speculation_seconds: how long `speculate` is believed without an event that says so.

    Raises:
        UserError: ``max_bytes`` is not enough for 64 holders.
    """

    def __init__(self, *, max_bytes: int, now: Callable[[], float], speculation_seconds: float = 10.0) -> None:
        holders = max_bytes // HOLDER_BYTES
        if holders < _LEAST_HOLDERS:
            raise UserError(
                f"{max_bytes} bytes hold {holders} blocks",
                where="max_bytes",
                remedy=f"give the index at least {_LEAST_HOLDERS * HOLDER_BYTES} bytes, {HOLDER_BYTES} for each block",
            )
        self.ignored: Counter[str] = Counter()
        """Blocks not taken or given up, by reason: malformed, kv_group, parked_full, evicted, guess_evicted."""
        self._most_parked = holders // 8
        known = holders // 16
        self._holdings = Holdings(holders - self._most_parked - known, known, self._places, self.ignored)
        self._now = now
        self._speculation_seconds = speculation_seconds
        self._pools: dict[str, Pool] = {}
        self._targets: dict[str, Target] = {}
        self._free_numbers: list[int] = []
        self._numbers = 0

    # What policies ask.

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        """For each target, its leading hits in blocks: HBM from the start, then what DRAM and the store bring back."""
        self._holdings.expire(self._now())
        masks = list(map(self._holdings.masks.get, keys, repeat(0)))
        return leading_hits(masks, [self._targets.get(name) for name in targets])

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        """A request with these keys was just sent to the target, which will hold them in HBM soon."""
        now = self._now()
        self._holdings.expire(now)
        self._holdings.guess(self._target(target), keys, now + self._speculation_seconds)
        self._holdings.make_room()

    def silence(self, target: str) -> str:
        """Why the index knows nothing of the target; "" when it does know."""
        owner = self._targets.get(target)
        return "no_events" if owner is None else owner.silence

    # What feeds tell of targets.

    def join(self, target: str, pool: str = "") -> None:
        """The target exists and shares the pool's store. A target that feeds speak of before joins pool ""."""
        owner = self._targets.get(target)
        if owner is not None:
            if owner.pool.name == pool:
                return
            self.leave(target)
        home = self._pool(pool)
        number = self._number()
        first = 1 << (1 + 3 * number)
        owner = Target(target, number, home, Place(first), Place(first << 2), first << 1)
        self._targets[target] = home.targets[target] = owner

    def leave(self, target: str) -> None:
        """The target is gone for good."""
        if target in self._targets:
            self.forget(target)
            owner = self._targets.pop(target)
            del owner.pool.targets[target]
            self._free_numbers.append(owner.number)

    def set_silence(self, target: str, reason: str) -> None:
        """Say why nothing reliable is known of the target (``stale``, …), or with "" that all is well again."""
        self._target(target).silence = reason

    def stored(self, target: str, medium: Medium, stored: StoredBlocks) -> None:
        """The target holds these blocks. Blocks of an unknown parent, and hashes of unknown content, are parked."""
        owner = self._target(target)
        if owner.silence == "no_events":
            owner.silence = ""
        hashes = stored.hashes
        full = stored.kv_kind in FULL_ATTENTION
        if full and stored.kv_kind and owner.kv_group is None:
            owner.kv_group = stored.kv_group
        if not full or stored.kv_group != (owner.kv_group or 0):
            self.ignored["kv_group"] += len(hashes)
        elif len(stored.token_ids) not in (0, len(hashes) * stored.block_tokens) or not _are_hashes(hashes):
            self.ignored["malformed"] += len(hashes)
        elif stored.token_ids:
            self._described(owner, medium, stored)
        else:
            self._named(owner, medium, stored)

    def removed(self, target: str, medium: Medium, hashes: Iterable[int], kv_group: int = 0) -> None:
        """The target holds these blocks no more on this medium; whatever else holds them still does."""
        owner = self._target(target)
        if kv_group != (owner.kv_group or 0) or (medium is Medium.STORE and owner.pool.fed):
            return
        place = self._place(owner, medium)
        for hash_ in hashes:
            if not self._holdings.release(place, hash_):
                owner.parked.remove(medium, hash_)
                if medium is Medium.STORE:
                    owner.pool.parked.remove(medium, hash_)

    def cleared(self, target: str, medium: Medium | None = None) -> None:
        """The target's cache was emptied on this medium; None = on all that are its own (HBM and DRAM)."""
        owner = self._target(target)
        media = [Medium.HBM, Medium.DRAM] if medium is None else [medium]
        for one in media:
            owner.parked.clear(one)
            if one is not Medium.STORE or not owner.pool.fed:
                self._holdings.empty(self._place(owner, one))
        if medium in (None, Medium.HBM):
            self._holdings.drop_guesses_of(owner)

    def forget(self, target: str) -> None:
        """Nothing that was said of the target is true any more; it will be learnt anew."""
        if (owner := self._targets.get(target)) is not None:
            self.cleared(target)
            owner.parked.clear()
            owner.silence = "no_events"

    # What the store's feed tells.

    def store_put(self, pool: str, hashes: Iterable[int], chunk_blocks: int = 0) -> None:
        """The pool's store holds the chunks that end in these blocks (engines' hashes, of the counting group).

        ``chunk_blocks``: blocks a chunk, 0 = as engines described them.
        """
        home = self._fed(pool)
        if chunk_blocks:
            home.store.chunk_blocks = chunk_blocks
        for hash_ in hashes:
            if key := self._key_in_pool(home, hash_):
                self._holdings.hold(home.store, hash_, key)
            else:
                home.parked.add_hash(Medium.STORE, hash_)
        self._bound_parked()
        self._holdings.make_room()

    def store_evicted(self, pool: str, hashes: Iterable[int]) -> None:
        """The pool's store holds these no more."""
        home = self._fed(pool)
        for hash_ in hashes:
            if not self._holdings.release(home.store, hash_):
                home.parked.remove(Medium.STORE, hash_)

    def store_cleared(self, pool: str) -> None:
        """The pool's store is empty, or what it holds is about to be told anew."""
        home = self._fed(pool)
        home.parked.clear(Medium.STORE)
        self._holdings.empty(home.store)

    # Sizes.

    @property
    def size(self) -> int:
        """Block-holders; a chunk outside HBM is one."""
        return self._holdings.size

    @property
    def keys(self) -> int:
        """Different blocks that somebody holds or is guessed to."""
        return len(self._holdings.masks)

    @property
    def guesses(self) -> int:
        """Blocks believed to be in HBM soon, by target."""
        return self._holdings.guesses

    @property
    def parked(self) -> int:
        """Blocks waiting to be described or for their parent."""
        return sum(parked.blocks for parked in self._all_parked())

    @property
    def nbytes(self) -> int:
        """Bytes of memory, but for small change."""
        tables = sum(place.blocks.nbytes for place in self._places())
        guesses = sum(sys.getsizeof(target.guesses) + 8 * len(target.guesses) for target in self._targets.values())
        parked = HOLDER_BYTES * sum(parked.weight for parked in self._all_parked())
        return self._holdings.nbytes + tables + guesses + parked

    def blocks_of(self, target: str) -> tuple[int, int]:
        """Blocks in HBM and chunks in DRAM that are known of the target."""
        owner = self._targets.get(target)
        return (0, 0) if owner is None else (len(owner.hbm.blocks), len(owner.dram.blocks))

    # Owners.

    def _number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        self._numbers += 1
        return self._numbers - 1

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            number = self._number()
            pool = self._pools[name] = Pool(name, number, Place(1 << (1 + 3 * number)))
        return pool

    def _fed(self, name: str) -> Pool:
        """The pool, whose store speaks for itself from now on: what engines said of it is void."""
        pool = self._pool(name)
        if not pool.fed:
            pool.fed = True
            told = [target.dram.chunk_blocks for target in pool.targets.values()]
            pool.store.chunk_blocks = max(pool.store.chunk_blocks, *told, 1)
            self._holdings.empty(pool.store)
            pool.parked.clear(Medium.STORE)
        return pool

    def _target(self, name: str) -> Target:
        if name not in self._targets:
            self.join(name)
        return self._targets[name]

    def _place(self, owner: Target, medium: Medium) -> Place:
        if medium is Medium.HBM:
            return owner.hbm
        return owner.dram if medium is Medium.DRAM else owner.pool.store

    def _places(self) -> list[Place]:
        places = [pool.store for pool in self._pools.values()]
        for target in self._targets.values():
            places += target.places
        return places

    def _all_parked(self) -> list[Parked]:
        return [*(target.parked for target in self._targets.values()), *(pool.parked for pool in self._pools.values())]

    # Placing blocks.

    def _described(self, owner: Target, medium: Medium, stored: StoredBlocks) -> None:
        """Place a run of blocks by their tokens, then what waited for them, and what waited for that."""
        news: list[Orphan] = []
        if not self._place_run(owner, medium, stored, None, news):
            if not owner.parked.add_orphan(medium, stored):
                self.ignored["malformed"] += len(stored.hashes)
            self._bound_parked()
            return
        while news:
            orphan = news.pop()
            self._place_run(owner, orphan.medium, orphan.stored, orphan.held, news)
        self._holdings.make_room()

    def _place_run(
        self, owner: Target, medium: Medium, stored: StoredBlocks, held: Sequence[bool] | None, news: list[Orphan]
    ) -> bool:
        """Place those blocks that are ``held`` (None = all); children found parked are added to ``news``. False = the
        parent is not known."""
        hashes = stored.hashes
        if stored.parent is None:
            start = chain_seed(stored.lora, stored.salt)
        elif not (start := self._key(owner, stored.parent)):
            return False
        try:
            keys = block_keys(stored.token_ids, stored.block_tokens, start, stored.extra_keys, len(hashes))
        except ValueError:
            keys = []
        if len(keys) != len(hashes):
            self.ignored["malformed"] += len(hashes)
            return True
        if medium is not Medium.HBM:
            self._hold_chunks(owner, medium, stored, keys, held)
        elif held is None or all(held):
            self._holdings.hold_run(owner, hashes, keys)
        else:
            there = [at for at, is_held in enumerate(held) if is_held]
            self._holdings.hold_run(owner, [hashes[at] for at in there], [keys[at] for at in there])
            for hash_, key in zip(hashes, keys, strict=True):
                self._holdings.remember(hash_, key)
        if owner.parked.blocks or owner.pool.parked.blocks:
            self._unpark(owner, hashes, keys, news)
        return True

    def _hold_chunks(
        self, owner: Target, medium: Medium, stored: StoredBlocks, keys: Sequence[int], held: Sequence[bool] | None
    ) -> None:
        place = self._place(owner, medium)
        chunk = stored.chunk_blocks or len(keys)
        self._learn_chunk(owner, place, chunk)
        for hash_, key in zip(stored.hashes, keys, strict=True):
            self._holdings.remember(hash_, key)
        if medium is Medium.STORE and owner.pool.fed:
            return
        for last in range(chunk - 1, len(keys), chunk):
            if held is None or held[last]:
                self._holdings.hold(place, stored.hashes[last], keys[last])

    @staticmethod
    def _learn_chunk(owner: Target, place: Place, blocks: int) -> None:
        """The store's feed does not say how long chunks are: as long as those of DRAM, whence they come."""
        place.chunk_blocks = blocks
        if place is owner.dram and owner.pool.fed and owner.pool.store.chunk_blocks == 1:
            owner.pool.store.chunk_blocks = blocks

    def _unpark(self, owner: Target, hashes: Sequence[int], keys: Sequence[int], news: list[Orphan]) -> None:
        orphans, named, stored = owner.parked.orphans, owner.parked, owner.pool.parked
        for hash_, key in zip(hashes, keys, strict=True):
            if hash_ in orphans:
                news += named.take_orphans(hash_)
            if named.unresolved:
                for medium in named.take_hash(hash_):
                    self._holdings.hold(self._place(owner, medium), hash_, key)
            if stored.blocks and stored.take_hash(hash_):
                self._holdings.hold(owner.pool.store, hash_, key)

    def _named(self, owner: Target, medium: Medium, stored: StoredBlocks) -> None:
        """Place blocks of which only the hashes are told."""
        place = self._place(owner, medium)
        if medium is Medium.STORE and owner.pool.fed:
            return
        if stored.chunk_blocks:
            self._learn_chunk(owner, place, stored.chunk_blocks)
        parked = owner.pool.parked if medium is Medium.STORE else owner.parked
        for hash_ in stored.hashes:
            if key := self._key(owner, hash_):
                self._holdings.hold(place, hash_, key)
            else:
                parked.add_hash(medium, hash_)
        self._bound_parked()
        self._holdings.make_room()

    def _key(self, owner: Target, hash_: int) -> int:
        """Own key of a hash as this target means it, or else as its pool does; 0 = not known."""
        return owner.hbm.blocks.get(hash_) or owner.dram.blocks.get(hash_) or self._key_in_pool(owner.pool, hash_)

    def _key_in_pool(self, pool: Pool, hash_: int) -> int:
        """Engines with equal hashes mean equal content by them; those with others do not collide in 64 bits."""
        if key := self._holdings.remembered(hash_) or pool.store.blocks.get(hash_):
            return key
        for target in pool.targets.values():
            if key := target.hbm.blocks.get(hash_) or target.dram.blocks.get(hash_):
                return key
        return 0

    def _bound_parked(self) -> None:
        everyone = self._all_parked()
        while sum(parked.weight for parked in everyone) > self._most_parked:
            self.ignored["parked_full"] += max(everyone, key=_weight).drop_oldest()


def _weight(parked: Parked) -> int:
    return parked.weight


def _are_hashes(hashes: Sequence[int]) -> bool:
    return not hashes or (min(hashes) >= 0 and max(hashes) < _HASH_END)
