"""Whatever engines and the store say, in whatever order, the index believes what a model of a few lines believes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.ports import Hits

HBM, DRAM, STORE = Medium
CHUNK = 2
TARGETS = ("a", "b")
POOL = {"a": "pool a", "b": "pool b"}
LIFE = 10.0

# A prompt is a path: one token a block. Most are beginnings of one, so that steps concern each other.
paths = st.one_of(
    st.integers(1, 6).map(lambda blocks: (0,) * blocks), st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
)
targets = st.sampled_from("aaab")
own_media = st.sampled_from([HBM, DRAM])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("run"), targets, paths, st.integers(0, 5)),
        st.tuples(st.just("chunk"), targets, paths, st.booleans()),
        st.tuples(st.just("removed"), targets, own_media, paths),
        st.tuples(st.just("cleared"), targets, st.sampled_from([HBM, DRAM, None])),
        st.tuples(st.just("forget"), targets),
        st.tuples(st.just("put"), targets, paths),
        st.tuples(st.just("evicted"), targets, paths),
        st.tuples(st.just("emptied"), targets),
        st.tuples(st.just("guess"), targets, paths),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 6.0])),
    ),
    min_size=20,  # hypothesis makes lists about twice as long
    max_size=60,
)


def prefixes(path: tuple, first: int = 1) -> list[tuple]:
    return [path[:end] for end in range(first, len(path) + 1)]


def engine_hash(target: str, path: tuple) -> int:
    return xxh3_64_intdigest(f"{target} {path}".encode())


class Model:
    """Sets of prefixes. ``told``: runs of (target, medium, parent, prefixes) whose parent nobody described yet."""

    def __init__(self) -> None:
        self.holds, self.known, self.told, self.guesses = set(), set(), [], {}

    def stored(self, target: str, medium: Medium, parent: tuple, run: list[tuple], kept: list[tuple]) -> None:
        self.holds |= {(target, medium, path) for path in kept}
        self.told.append((target, medium, parent, run))
        while ready := [run for run in self.told if not run[2] or (run[0], run[2]) in self.known]:
            for run in ready:
                self.told.remove(run)
                self.known |= {(run[0], path) for path in run[3]}
                for path in run[3]:
                    if run[1] is HBM and (run[0], HBM, path) in self.holds:
                        self.guesses.pop((run[0], path), None)

    def drop(self, target: str, *media: Medium) -> None:
        self.holds = {held for held in self.holds if held[0] != target or held[1] not in media}
        self.told = [run for run in self.told if run[0] != target or run[1] not in media]
        if HBM in media:
            self.guesses = {guess: expires for guess, expires in self.guesses.items() if guess[0] != target}

    def has(self, target: str, medium: Medium, path: tuple) -> bool:
        return (target, medium, path) in self.holds and (target, path) in self.known

    def hits(self, target: str, path: tuple, now: float) -> Hits:
        hbm = dram = store = 0
        while hbm < len(path) and (
            self.has(target, HBM, path[: hbm + 1]) or self.guesses.get((target, path[: hbm + 1]), 0) > now
        ):
            hbm += 1
        at = hbm
        while (end := at + CHUNK - at % CHUNK) <= len(path):
            if self.has(target, DRAM, path[:end]):
                dram += end - at
            elif self.has(target, STORE, path[:end]):
                store += end - at
            else:
                break
            at = end
        return Hits(hbm, dram, store)


class Fleet:
    """The index and the model, told the same."""

    def __init__(self) -> None:
        self.now = 0.0
        self.model = Model()
        self.index = KvIndex(max_bytes=1 << 24, now=lambda: self.now, speculation_seconds=LIFE)
        for target in TARGETS:
            self.index.join(target, POOL[target])
            self.index.store_put(POOL[target], [], CHUNK)

    def run(self, target: str, path: tuple, begin: int) -> None:
        parent = path[: min(begin, len(path) - 1)]
        self._stored(target, HBM, parent, path, prefixes(path, len(parent) + 1))

    def chunk(self, target: str, path: tuple, described: bool) -> None:
        path = path[: len(path) // CHUNK * CHUNK]
        if not path:
            return
        if described:
            self._stored(target, DRAM, path[:-CHUNK], path, [path])
            return
        self.model.holds.add((target, DRAM, path))
        self.index.stored(target, DRAM, StoredBlocks([engine_hash(target, path)], chunk_blocks=CHUNK))

    def _stored(self, target: str, medium: Medium, parent: tuple, path: tuple, kept: list[tuple]) -> None:
        run = prefixes(path, len(parent) + 1)
        self.model.stored(target, medium, parent, run, kept)
        hashes = [engine_hash(target, prefix) for prefix in run]
        parent_hash = engine_hash(target, parent) if parent else None
        tokens = path[len(parent) :]
        self.index.stored(target, medium, StoredBlocks(hashes, parent_hash, tokens, 1, chunk_blocks=CHUNK))

    def removed(self, target: str, medium: Medium, path: tuple) -> None:
        self.model.holds.discard((target, medium, path))
        self.index.removed(target, medium, [engine_hash(target, path)])

    def cleared(self, target: str, medium: Medium | None) -> None:
        self.model.drop(target, *([HBM, DRAM] if medium is None else [medium]))
        self.index.cleared(target, medium)

    def forget(self, target: str) -> None:
        self.model.drop(target, HBM, DRAM)
        self.index.forget(target)

    def put(self, target: str, path: tuple) -> None:
        path = path[: len(path) // CHUNK * CHUNK]
        if path:
            self.model.holds.add((target, STORE, path))
            self.index.store_put(POOL[target], [engine_hash(target, path)])

    def evicted(self, target: str, path: tuple) -> None:
        self.model.holds.discard((target, STORE, path))
        self.index.store_evicted(POOL[target], [engine_hash(target, path)])

    def emptied(self, target: str) -> None:
        self.model.drop(target, STORE)
        self.index.store_cleared(POOL[target])

    def guess(self, target: str, path: tuple) -> None:
        for prefix in prefixes(path):
            if not self.model.has(target, HBM, prefix):
                self.model.guesses[target, prefix] = self.now + LIFE
        self.index.speculate(target, block_keys(path, 1, chain_seed()))

    def wait(self, seconds: float) -> None:
        self.now += seconds


@given(steps=steps, asked=st.lists(paths, min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_the_index_believes_what_it_was_told(steps, asked):
    fleet = Fleet()
    for name, *arguments in steps:
        getattr(fleet, name)(*arguments)
    for path in {*asked, *(argument for step in steps for argument in step if isinstance(argument, tuple))}:
        believed = fleet.index.match(block_keys(path, 1, chain_seed()), TARGETS)
        assert believed == [fleet.model.hits(target, path, fleet.now) for target in TARGETS]
    known = {held for held in fleet.model.holds if (held[0], held[2]) in fleet.model.known}
    assert fleet.index.size == len(known)


@given(steps=steps)
@settings(max_examples=100, deadline=None)
def test_once_all_is_forgotten_nothing_is_left(steps):
    fleet = Fleet()
    for name, *arguments in steps:
        getattr(fleet, name)(*arguments)
    for target in TARGETS:
        fleet.index.leave(target)
        fleet.index.store_cleared(POOL[target])
    index = fleet.index
    assert (index.size, index.keys, index.guesses, index.parked) == (0, 0, 0, 0)
