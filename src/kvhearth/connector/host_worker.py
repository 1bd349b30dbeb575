"""Moves chunks between an engine's KV cache and its DRAM region where both are plain memory: vLLM's CPU platform.

Upstream's worker needs CUDA streams. This one copies on a thread, in the order of submission, and keeps the same
promises: `submit_store` and `submit_load` return at once, `wait` returns when the copies are done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvhearth.connector.threads import start_thread

_log = logging.getLogger(__name__)

_Pair = tuple[int, int, int]  # KV block, row, block within the row
_Copy = Callable[[_Pair, bool], int]  # (what, into the cache?) -> bytes


class HostOffloadingWorker(OffloadingWorker):
    """The worker of one rank.

    Args:
        kv_caches: the rank's tensors and which of them each KV group uses.
        blocks_per_chunk: KV blocks a row.
        region: the engine's DRAM; owned from here on.
        canonical: rows are laid out alike under any tensor parallelism.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion, *, canonical: bool
    ) -> None:
        self._mmap_region: SharedOffloadRegion | None = region
        self._blocks_per_chunk = blocks_per_chunk
        self._copies = _plan_copies(kv_caches, blocks_per_chunk, region, canonical=canonical)
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, list[tuple[int, list[_Pair]]], bool]] = deque()
        self._open: set[int] = set()
        self._finished: list[TransferResult] = []
        self._closed = False
        self._failure: Exception | None = None
        self._thread = start_thread(self._run, "copy")

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy KV blocks into rows."""
        return self._submit(job_id, src_spec, dst_spec, into_cache=False)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy rows into KV blocks."""
        return self._submit(job_id, dst_spec, src_spec, into_cache=True)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that are done, in order."""
        with self._changed:
            self._check()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return once these are done: their blocks are about to be used for something else. Copies cannot stall, so
        there is no deadline. Raises RuntimeError when one has failed."""
        with self._changed:
            while not self._open.isdisjoint(job_ids):
                self._check()
                self._changed.wait()

    def shutdown(self) -> None:
        """Finish what was submitted and let go of the region."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._copies = []
        if self._mmap_region is not None:
            self._mmap_region.cleanup()
            self._mmap_region = None

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("a copy between KV cache and DRAM failed") from self._failure

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, rows: Any, *, into_cache: bool) -> bool:
        # The rows of all groups come in one list, group by group; the first row of a group may be used in part.
        work, block_at, row_at = [], 0, 0
        size = self._blocks_per_chunk
        for kv_group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not count:
                continue
            skip = first % size
            pairs = [
                (
                    int(blocks.block_ids[block_at + i]),
                    int(rows.block_ids[row_at + (skip + i) // size]),
                    (skip + i) % size,
                )
                for i in range(count)
            ]
            work.append((kv_group, pairs))
            block_at += count
            row_at += -(-(skip + count) // size)
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker is shut down")
            self._queue.append((job_id, work, into_cache))
            self._open.add(job_id)
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if not self._queue:
                    return
                job_id, work, into_cache = self._queue.popleft()
            started, nbytes = time.monotonic(), 0
            try:
                for kv_group, pairs in work:
                    for copy in self._copies[kv_group]:
                        for pair in pairs:
                            nbytes += copy(pair, into_cache)
            except Exception as error:  # vLLM knows no failed copy; going on would serve wrong bytes
                _log.critical("a copy between KV cache and DRAM failed; this engine must not go on", exc_info=True)
                with self._changed:
                    self._failure = error.with_traceback(None)  # its frames would keep the region's memory
                    self._changed.notify_all()
                return
            result = TransferResult(job_id, True, nbytes, time.monotonic() - started)
            with self._changed:
                self._open.discard(job_id)
                self._finished.append(result)
                self._changed.notify_all()


def _plan_copies(
    kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion, *, canonical: bool
) -> list[list[_Copy]]:
    """For each KV group, what copies one block of it."""
    sizes = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    if canonical:
        for refs in kv_caches.group_data_refs:
            for ref in refs:
                sizes[ref.tensor_idx] = ref.mapping.canonical_page_size_bytes
    caches, rows = [], []
    for tensor, size in zip(kv_caches.tensors, sizes, strict=True):
        caches.append(_bytes_of(tensor.tensor, tensor.page_size_bytes))
        make = region.create_next_canonical_view if canonical else region.create_next_worker_view
        rows.append(make(size * blocks_per_chunk).numpy().view(np.uint8))
    return [
        [
            _mapped_copy(caches[ref.tensor_idx], rows[ref.tensor_idx], sizes[ref.tensor_idx], blocks_per_chunk, ref)
            if canonical
            else _page_copy(caches[ref.tensor_idx], rows[ref.tensor_idx], sizes[ref.tensor_idx], ref.page_size_bytes)
            for ref in refs
        ]
        for refs in kv_caches.group_data_refs
    ]


def _bytes_of(tensor: torch.Tensor, page_bytes: int) -> np.ndarray[Any, Any]:
    """A KV tensor as bytes, shape (blocks, page_bytes), sharing its memory."""
    pages: np.ndarray[Any, Any] = tensor.view(torch.int8).view(-1, page_bytes).numpy().view(np.uint8)
    return pages


def _page_copy(cache: Any, rows: Any, stride: int, page_bytes: int) -> _Copy:
    def copy(what: _Pair, into_cache: bool) -> int:
        block, row, part = what
        page, place = cache[block, :page_bytes], rows[row, part * stride : part * stride + page_bytes]
        if into_cache:
            page[:] = place
        else:
            place[:] = page
        return page_bytes

    return copy


def _mapped_copy(cache: Any, rows: Any, stride: int, blocks_per_chunk: int, ref: CanonicalKVCacheRef) -> _Copy:
    """As `_page_copy`, with the page's pieces at their canonical places; ranks with equal bytes take turns writing."""
    mapping = ref.mapping

    def copy(what: _Pair, into_cache: bool) -> int:
        block, row, part = what
        if not into_cache and not mapping.is_writer(row * blocks_per_chunk + part):
            return 0
        page, place = cache[block], rows[row, part * stride : (part + 1) * stride]
        nbytes = 0
        for run in mapping.runs:
            for i in range(run.num_fragments):
                local, there = run.local_offset + i * run.local_stride, run.canonical_offset + i * run.canonical_stride
                mine, other = page[local : local + run.fragment_size], place[there : there + run.fragment_size]
                if into_cache:
                    mine[:] = other
                else:
                    other[:] = mine
                nbytes += run.fragment_size
        return nbytes

    return copy
