"""Blocks of a KV cache in plain memory and rows of DRAM: each byte goes where it belongs, in the order asked for."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvhearth.connector import host_worker
from kvhearth.connector.host_worker import HostOffloadingWorker

BLOCKS = 48
ROWS = 16
PAGE = 4096
JOIN_SECONDS = 30.0


class Shape(NamedTuple):
    """A cache: bytes a page of each tensor, the tensors of each KV group, and blocks a chunk."""

    pages: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    blocks_per_chunk: int


@dataclass
class Rank:
    """A worker with its cache and region."""

    worker: HostOffloadingWorker
    region: SharedOffloadRegion
    caches: list[torch.Tensor]
    shape: Shape

    def fill(self, seed: int) -> None:
        """Other bytes in the cache."""
        rng = np.random.default_rng(seed)
        for cache in self.caches:
            cache[:] = torch.from_numpy(rng.integers(-128, 128, tuple(cache.shape), dtype=np.int8))

    def copy(self) -> list[np.ndarray[Any, Any]]:
        """What is in the cache now."""
        return [cache.numpy().copy() for cache in self.caches]

    def rows(self) -> np.ndarray[Any, Any]:
        """What is in the region now, shape (rows, bytes)."""
        return np.array(self.region.create_kv_memoryview(), dtype=np.int8).copy()

    def store(self, job_id: int, blocks: GPULoadStoreSpec, rows: list[int]) -> None:
        assert self.worker.submit_store(job_id, blocks, CPULoadStoreSpec(rows))

    def load(self, job_id: int, rows: list[int], blocks: GPULoadStoreSpec) -> None:
        assert self.worker.submit_load(job_id, CPULoadStoreSpec(rows), blocks)


def region_of(engine_id: str, row_bytes: int, *, rank: int = 0, ranks: int = 1) -> SharedOffloadRegion:
    page = -(-row_bytes // PAGE) * PAGE
    return SharedOffloadRegion(engine_id, ROWS, rank, page * ranks, page)


def make(shape: Shape, mappings: dict[int, CanonicalPageMapping] | None = None, engine_id: str | None = None) -> Rank:
    """A rank; ``mappings``: by tensor, for the canonical layout."""
    engine_id = engine_id or f"test-{uuid.uuid4().hex}"
    sizes = [mappings[at].canonical_page_size_bytes if mappings else page for at, page in enumerate(shape.pages)]
    region = region_of(engine_id, sum(sizes) * shape.blocks_per_chunk)
    caches = [torch.zeros((BLOCKS, page), dtype=torch.int8) for page in shape.pages]
    tensors = [CanonicalKVCacheTensor(cache, page) for cache, page in zip(caches, shape.pages, strict=True)]
    refs = [
        [CanonicalKVCacheRef(at, shape.pages[at], mappings[at] if mappings else None) for at in group]
        for group in shape.groups
    ]
    worker = HostOffloadingWorker(
        CanonicalKVCaches(tensors, refs), shape.blocks_per_chunk, region, canonical=mappings is not None
    )
    return Rank(worker, region, caches, shape)


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Two tensors in one group, two blocks a chunk."""
    made = make(Shape((64, 128), ((0, 1),), 2))
    yield made
    made.worker.shutdown()


def one_group(blocks: list[int], first: int = 0) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[first])


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Shape, list[int], list[int], list[int], list[int], list[int]]:
    """A shape; for each group how many blocks and where the first lies in its request; blocks to read, blocks to write,
    and rows, all distinct."""
    groups = draw(st.integers(1, 3))
    members: list[tuple[int, ...]] = []
    count = 0
    for _ in range(groups):
        if count and draw(st.booleans()):  # hybrid models let groups share tensors
            members.append(draw(st.sampled_from(members)))
            continue
        tensors = draw(st.integers(1, 3))
        members.append(tuple(range(count, count + tensors)))
        count += tensors
    pages = tuple(draw(st.lists(st.integers(1, 6).map(lambda n: 8 * n), min_size=count, max_size=count)))
    size = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 7), min_size=groups, max_size=groups))
    firsts = draw(st.lists(st.integers(0, 9), min_size=groups, max_size=groups))
    needed = sum(-(-(first % size + n) // size) for n, first in zip(sizes, firsts, strict=True) if n)
    rows = draw(st.permutations(range(ROWS)))
    if needed > ROWS:
        sizes, firsts, needed = [min(n, 2) for n in sizes], [0] * groups, sum(-(-min(n, 2) // size) for n in sizes if n)
    blocks = draw(st.permutations(range(BLOCKS)))
    total = sum(sizes)
    return Shape(pages, tuple(members), size), sizes, firsts, blocks[:total], blocks[total : 2 * total], rows[:needed]


@settings(max_examples=60, deadline=None)
@given(transfers(), st.integers(0, 99))
def test_what_is_stored_lies_where_vllm_puts_it_and_comes_back_as_it_was(case: Any, seed: int) -> None:
    shape, sizes, firsts, read, written, rows = case
    rank = make(shape)
    try:
        rank.fill(seed)
        before, empty = rank.copy(), rank.rows()
        rank.store(1, GPULoadStoreSpec(read, sizes, firsts), rows)
        rank.worker.wait({1})
        expected, moved = place(shape, sizes, firsts, read, rows, before, empty)
        assert (rank.rows() == expected).all()

        rank.load(2, rows, GPULoadStoreSpec(written, sizes, firsts))
        rank.worker.wait({2})
        wanted = [cache.copy() for cache in before]
        at = 0
        for count, group in zip(sizes, shape.groups, strict=True):
            for source, target in zip(read[at : at + count], written[at : at + count], strict=True):
                for tensor in group:
                    wanted[tensor][target] = before[tensor][source]
            at += count
        for found, want in zip(rank.copy(), wanted, strict=True):
            assert (found == want).all()
        results = rank.worker.get_finished()
        assert [(each.job_id, each.success, each.transfer_size) for each in results] == [
            (1, True, moved),
            (2, True, moved),
        ]
    finally:
        rank.worker.shutdown()


def place(
    shape: Shape, sizes: list[int], firsts: list[int], read: list[int], rows: list[int], caches: Any, region: Any
) -> tuple[Any, int]:
    """The reference: where each block of each group lies in the region, and how many bytes that are."""
    size = shape.blocks_per_chunk
    offsets = [sum(shape.pages[:tensor]) * size for tensor in range(len(shape.pages))]
    expected, moved, at, row_at = region.copy(), 0, 0, 0
    for count, first, group in zip(sizes, firsts, shape.groups, strict=True):
        if not count:
            continue
        chunks = sorted({(first + i) // size for i in range(count)})
        for i in range(count):
            row, part = rows[row_at + chunks.index((first + i) // size)], (first + i) % size
            for tensor in group:
                page = shape.pages[tensor]
                start = offsets[tensor] + part * page
                expected[row, start : start + page] = caches[tensor][read[at + i]]
                moved += page
        at += count
        row_at += len(chunks)
    return expected, moved


# ---- canonical layout


def head_mapping(rank: int, ranks: int, tokens: int, head_bytes: int) -> CanonicalPageMapping:
    """Heads split over the ranks; canonically a token's heads lie side by side."""
    return CanonicalPageMapping(
        canonical_page_size_bytes=ranks * tokens * head_bytes,
        local_page_size_bytes=tokens * head_bytes,
        runs=(CopyRun(0, rank * head_bytes, head_bytes, tokens, head_bytes, ranks * head_bytes),),
        num_writers=1,
        writer_index=0,
        parallelism_agnostic=True,
    )


def copied_mapping(rank: int, ranks: int, page: int) -> CanonicalPageMapping:
    """Every rank has the same bytes (MLA); they take turns."""
    return CanonicalPageMapping(page, page, (CopyRun(0, 0, page, 1, page, page),), ranks, rank, True)


TOKENS, HEAD = 4, 24


def canonical_ranks(ranks: int, blocks_per_chunk: int) -> list[Rank]:
    """An engine of so many ranks, all on one region: a tensor split by heads and one that all have."""
    engine_id = f"test-{uuid.uuid4().hex}"
    local = TOKENS * HEAD * 2 // ranks  # two heads in all
    shape = Shape((local, 40), ((0, 1),), blocks_per_chunk)
    return [
        make(
            shape, {0: head_mapping(at, ranks, TOKENS, 2 * HEAD // ranks), 1: copied_mapping(at, ranks, 40)}, engine_id
        )
        for at in range(ranks)
    ]


def fill_alike(engine: list[Rank], seed: int) -> None:
    """The same KV whatever the number of ranks: (block, token, head, byte), and what all ranks have."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(-128, 128, (BLOCKS, TOKENS, 2, HEAD), dtype=np.int8)
    common = rng.integers(-128, 128, (BLOCKS, 40), dtype=np.int8)
    share = 2 // len(engine)
    for at, rank in enumerate(engine):
        mine = heads[:, :, at * share : (at + 1) * share].reshape(BLOCKS, -1)
        rank.caches[0][:] = torch.from_numpy(np.ascontiguousarray(mine))
        rank.caches[1][:] = torch.from_numpy(common)


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_write_the_bytes_that_one_rank_writes_and_read_each_others(blocks_per_chunk: int, first: int) -> None:
    one, two = canonical_ranks(1, blocks_per_chunk), canonical_ranks(2, blocks_per_chunk)
    read, written = [5, 9, 2, 30, 11], [20, 21, 22, 23, 24]
    rows = [7, 3, 12, 1, 0, 9][: -(-(first % blocks_per_chunk + 5) // blocks_per_chunk)]
    try:
        for engine in (one, two):
            fill_alike(engine, 5)
            for rank in engine:
                rank.store(1, one_group(read, first), rows)
                rank.worker.wait({1})
        width = blocks_per_chunk * (2 * TOKENS * HEAD + 40)
        assert (one[0].rows()[:, :width] == two[0].rows()[:, :width]).all()
        assert one[0].rows()[rows[0]].any()

        # The other way round: two ranks load what one rank wrote.
        for rank in two:
            np.asarray(rank.region.create_kv_memoryview())[:] = one[0].rows()
            wanted = rank.copy()
            for cache in wanted:
                cache[written] = cache[read]
            rank.load(2, rows, one_group(written, first))
            rank.worker.wait({2})
            for found, want in zip(rank.copy(), wanted, strict=True):
                assert (found == want).all()
    finally:
        for rank in one + two:
            rank.worker.shutdown()


# ---- order and time


def held(rank: Rank) -> tuple[threading.Event, threading.Event]:
    """Copies of this rank begin (first event) and go on when told (second)."""
    begun, go = threading.Event(), threading.Event()
    copies = rank.worker._copies[0]

    def slow(copy: Any) -> Any:
        def run(what: Any, into_cache: bool) -> int:
            begun.set()
            assert go.wait(JOIN_SECONDS)
            moved: int = copy(what, into_cache)
            return moved

        return run

    rank.worker._copies[0] = [slow(copy) for copy in copies]
    return begun, go


def test_submitting_returns_at_once_and_wait_returns_when_the_copies_are_done(rank: Rank) -> None:
    begun, go = held(rank)
    rank.fill(1)
    rank.store(1, one_group([3, 4]), [0])
    assert begun.wait(JOIN_SECONDS)
    assert rank.worker.get_finished() == []
    waiter = threading.Thread(target=rank.worker.wait, args=({1},))
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    assert not rank.rows().any()
    go.set()
    waiter.join(JOIN_SECONDS)

    assert not waiter.is_alive()
    assert rank.rows().any()
    assert [each.job_id for each in rank.worker.get_finished()] == [1]
    assert rank.worker.get_finished() == []


def test_wait_is_for_the_jobs_named_and_for_none_that_are_done_or_unknown(rank: Rank) -> None:
    rank.store(1, one_group([3, 4]), [0])
    rank.worker.wait({1})
    begun, go = held(rank)
    rank.store(2, one_group([5, 6]), [1])
    assert begun.wait(JOIN_SECONDS)
    rank.worker.wait(set())
    rank.worker.wait({1, 99})
    go.set()
    rank.worker.wait({1, 2})

    assert [each.job_id for each in rank.worker.get_finished()] == [1, 2]


def test_a_row_stored_loaded_and_stored_anew_gives_each_what_was_asked_in_that_order(rank: Rank) -> None:
    _, go = held(rank)
    rank.fill(2)
    before = rank.copy()
    rank.store(1, one_group([0, 1]), [5])
    rank.load(2, [5], one_group([10, 11]))
    rank.store(3, one_group([2, 3]), [5])
    rank.load(4, [5], one_group([12, 13]))
    go.set()
    rank.worker.wait({1, 2, 3, 4})

    for found, was in zip(rank.copy(), before, strict=True):
        assert (found[[10, 11]] == was[[0, 1]]).all()
        assert (found[[12, 13]] == was[[2, 3]]).all()
    assert [each.job_id for each in rank.worker.get_finished()] == [1, 2, 3, 4]


def test_many_jobs_of_many_threads_worth_of_steps_all_end(rank: Rank) -> None:
    rng = np.random.default_rng(3)
    rank.fill(3)
    model, rows = rank.copy(), dict.fromkeys(range(ROWS))
    for job in range(0, 400, 2):
        row, source, target = (int(n) for n in (rng.integers(ROWS), rng.integers(BLOCKS - 1), rng.integers(BLOCKS - 1)))
        rank.store(job, one_group([source, source + 1]), [row])
        rows[row] = [cache[[source, source + 1]].copy() for cache in model]
        rank.load(job + 1, [row], one_group([target, target + 1]))
        for cache, values in zip(model, rows[row], strict=True):
            cache[[target, target + 1]] = values
    rank.worker.wait(set(range(400)))

    for found, want in zip(rank.copy(), model, strict=True):
        assert (found == want).all()
    assert [each.job_id for each in rank.worker.get_finished()] == list(range(400))


# ---- failures and the end


def test_a_copy_that_fails_is_raised_to_whoever_waits_or_asks(rank: Rank) -> None:
    """vLLM knows no failed copy; going on would serve wrong bytes, and waiting would be for ever."""
    _, go = held(rank)
    rank.store(1, one_group([0, 1]), [ROWS + 5])
    rank.store(2, one_group([2, 3]), [0])
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            rank.worker.wait({2})
        except BaseException as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    go.set()
    waiter.join(JOIN_SECONDS)
    assert not waiter.is_alive()
    assert [type(error) for error in raised] == [RuntimeError]
    assert "copy between KV cache and DRAM failed" in str(raised[0])
    assert isinstance(raised[0].__cause__, IndexError)
    with pytest.raises(RuntimeError, match="copy between"):
        rank.worker.get_finished()
    rank.store(3, one_group([4, 5]), [1])
    with pytest.raises(RuntimeError, match="copy between"):
        rank.worker.wait({3})


def shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("vllm_offload_test-")}


@pytest.mark.parametrize("failed", [False, True])
def test_shutdown_leaves_no_file_no_thread_and_no_mapping(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps what is logged, with its traceback, which keeps the rows.
    monkeypatch.setattr(host_worker, "_log", logging.Logger("unheard"))
    threads, names = set(threading.enumerate()), shm_names()
    rank = make(Shape((64,), ((0,),), 1))
    assert shm_names() - names
    rank.store(1, one_group([0]), [ROWS + 1 if failed else 0])
    try:
        rank.worker.wait({1})
    except RuntimeError:
        assert failed
    region = rank.region
    mapped = region.mmap_obj
    rank.worker.shutdown()
    rank.worker.shutdown()

    assert shm_names() <= names
    assert set(threading.enumerate()) <= threads
    assert region.mmap_obj is None
    assert mapped is not None
    assert mapped.closed


def test_shutdown_finishes_what_was_submitted() -> None:
    rank = make(Shape((64,), ((0,),), 1))
    rank.fill(4)
    want = rank.copy()[0]
    for job in range(ROWS):
        rank.store(job, one_group([job]), [job])
    for job in range(ROWS):
        rank.load(ROWS + job, [job], one_group([20 + job]))
    rank.worker.shutdown()

    assert (rank.caches[0].numpy()[20 : 20 + ROWS] == want[:ROWS]).all()
    assert len(rank.worker.get_finished()) == 2 * ROWS


def test_a_job_submitted_after_shutdown_is_refused_rather_than_waited_for_for_ever() -> None:
    rank = make(Shape((64,), ((0,),), 1))
    rank.worker.shutdown()

    with pytest.raises(RuntimeError):
        rank.worker.submit_store(1, one_group([0]), CPULoadStoreSpec([0]))


def test_pages_with_padding_keep_their_place_and_the_padding_is_left_alone() -> None:
    """A tensor's page may be longer than what a layer uses of it."""
    engine_id = f"test-{uuid.uuid4().hex}"
    region = region_of(engine_id, 64 * 2)
    cache = torch.arange(BLOCKS * 64, dtype=torch.int64).to(torch.int8).view(BLOCKS, 64).clone()
    kv = CanonicalKVCaches([CanonicalKVCacheTensor(cache, 64)], [[CanonicalKVCacheRef(0, 48)]])
    worker = HostOffloadingWorker(kv, 2, region, canonical=False)
    rank = Rank(worker, region, [cache], Shape((64,), ((0,),), 2))
    try:
        before = rank.copy()[0]
        rank.store(1, one_group([3, 4]), [2])
        rank.load(2, [2], one_group([8, 9]))
        worker.wait({1, 2})
        row, after = rank.rows()[2], rank.copy()[0]

        assert (row[:48] == before[3, :48]).all()
        assert (row[64:112] == before[4, :48]).all()
        assert (after[[8, 9], :48] == before[[3, 4], :48]).all()
        assert (after[[8, 9], 48:] == before[[8, 9], 48:]).all()
    finally:
        worker.shutdown()
