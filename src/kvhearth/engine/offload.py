"""KV beyond HBM: what DRAM and the store hold of a request, and the transfers that fetch, load, save and put it.

It plans and keeps count; the `Transfers` port moves. Follows vLLM 0.32's ``OffloadingConnector`` with its
``TieringOffloadingManager`` (``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``,
``vllm/v1/kv_offload/tiering/manager.py``), with these differences, each to keep it simple or bounded:

- A save holds its blocks until it is done. vLLM lets them go and stalls the step that reuses them; here a request that
  needs such blocks waits for the save (see ``pending_frees``), as vLLM does for connectors that free late.
- A fetch that comes short, or chunks evicted again before they were used, are not asked for for ever: the admission
  computes what is missing after ``_MAX_FETCHES`` tries. A failed load is not tried again.
- A save for which DRAM has no room keeps its place: later steps offer the same chunks again, so that no chunk is saved
  whose predecessor was not. A put for which there is no room in flight is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvhearth.engine.accounting import DRAM, STORE, Hit
from kvhearth.engine.block_pool import BlockPool
from kvhearth.engine.dram import DramTier
from kvhearth.engine.ports import Counters, EngineConfig, Job, JobKind, OffloadMode, Transfers
from kvhearth.engine.request import NEVER, UNKNOWN, RequestState

_MAX_FETCHES = 3
"""Fetches one admission may start."""


class _InFlight(NamedTuple):
    """A job and what it holds."""

    kind: JobKind
    keys: tuple[int, ...]
    request: RequestState
    blocks: tuple[int, ...]


class Offloader:
    """DRAM tier and jobs of one engine, in mode native or shared.

    In flight at most: one load or fetch a request, saves and fetches for the chunks DRAM has, puts for half of them.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters) -> None:
        self.dram = DramTier(config.dram_chunks)
        self._pool = pool
        self._counters = counters
        self._shared = config.mode is OffloadMode.SHARED
        self._prompt_only = config.offload_prompt_only
        self._deduplicate_loads = config.enable_prefix_caching
        self._blocks_per_chunk = config.blocks_per_chunk
        self._block_size = config.block_size
        self._chunk_tokens = config.block_size * config.blocks_per_chunk
        self._chunk_bytes = config.chunk_bytes
        self._jobs: dict[int, _InFlight] = {}
        self._unstarted: list[Job] = []
        self._gone: list[str] = []
        self._next_job_id = 0
        self._loading: dict[int, int] = {}
        self._orphans = 0
        self._put_room = config.dram_chunks // 2

    @property
    def busy(self) -> bool:
        """Something is in flight, or waits for the next step to be told to the port."""
        return bool(self._jobs or self._gone)

    @property
    def pending_frees(self) -> bool:
        """Blocks will come free without anyone being preempted: a save still reads what its request has let go."""
        return self._orphans > 0

    def first_save(self, request_prompt: int) -> int:
        """Computed tokens at which a new request's first save is due."""
        return self._chunk_tokens if not self._prompt_only or request_prompt >= self._chunk_tokens else NEVER

    # ---- once a step

    def advance(self, transfers: Transfers) -> None:
        """Take in finished jobs, then start the saves that the last step made possible."""
        for request_id in self._gone:
            transfers.forget(request_id)
        self._gone.clear()
        for job_id, keys_ok in transfers.finished():
            job = self._jobs.pop(job_id)
            ok = max(0, min(keys_ok, len(job.keys)))
            if job.kind is JobKind.LOAD:
                self._loaded(job, ok)
            elif job.kind is JobKind.SAVE:
                self._saved(job, ok, transfers)
            elif job.kind is JobKind.FETCH:
                self._fetched(job_id, job, ok)
            else:
                self._put(job, ok)
        for waiting in self._unstarted:
            transfers.start(waiting)
        self._unstarted.clear()

    # ---- into HBM

    def match(self, request: RequestState, local: int, transfers: Transfers) -> int | None:
        """Tokens that DRAM can supply beyond ``local`` (computed tokens found in HBM; whole blocks).

        0 or at least a chunk. None: not known yet, or on its way from the store; ask again in the next step. May start
        a fetch.
        """
        if request.compute_rest or request.tokens == 1 or request.tokens - local < self._chunk_tokens:
            return 0
        if request.saves or request.fetch is not None:
            return None
        first = local // self._chunk_tokens
        keys = self._keys(request, first, request.tokens // self._chunk_tokens)
        lead, pending = self.dram.lead(keys)
        if pending or (self._shared and lead < len(keys) and self._on_its_way(request, first, lead, keys, transfers)):
            return None
        if self._deduplicate_loads and self._loading and any(key in self._loading for key in keys[:lead]):
            return None
        found = (first + lead) * self._chunk_tokens - local
        return found if found >= self._chunk_tokens else 0

    def begin_load(self, request: RequestState, local: int, found: int, transfers: Transfers) -> None:
        """Start loading what `match` found; the request's blocks are allocated."""
        first, end = local // self._chunk_tokens, (local + found) // self._chunk_tokens
        keys = self._keys(request, first, end)
        self.dram.pin(keys)
        for key in keys:
            self._loading[key] = self._loading.get(key, 0) + 1
        request.load_first = first
        request.load = self._begin(JobKind.LOAD, keys, request, transfers)
        request.hits.extend(self._sources(request, first, keys, local))
        request.saved_chunks = max(request.saved_chunks, end)
        request.next_save = self._next_save(request)
        self._answered(request)

    def forget(self, request: RequestState) -> None:
        """The request is gone or past its lookup."""
        self._answered(request)

    def let_go(self, request: RequestState) -> None:
        """The request drops its blocks; saves that read them hold them on."""
        if request.saves and not request.released:
            request.released = True
            self._orphans += request.saves

    # ---- out of HBM

    def plan_save(self, request: RequestState) -> None:
        """Save the chunks that became full; the job starts with the next step, when their KV is there."""
        if not self.dram.room:
            return
        limit = min(request.computed, request.prompt) if self._prompt_only else request.computed
        first, end = request.saved_chunks, limit // self._chunk_tokens
        keys = self._keys(request, first, end)
        new = [(i, key) for i, key in enumerate(keys, first) if key not in self.dram]
        fit = self.dram.reserve([key for _, key in new], set(keys))
        request.saved_chunks = end if fit == len(new) else new[fit][0]
        request.next_save = self._next_save(request)
        if not fit:
            return
        size = self._blocks_per_chunk
        blocks = tuple(b for i, _ in new[:fit] for b in request.blocks[i * size : (i + 1) * size])
        self._pool.take(blocks)
        request.saves += 1
        job = self._register(JobKind.SAVE, tuple(key for _, key in new[:fit]), request, blocks)
        self._unstarted.append(job)

    def used(self, request: RequestState) -> None:
        """The request ends: its chunks count as used now, the first ones last, as they are shared most."""
        tokens = min(request.computed, request.prompt) if self._prompt_only else request.computed
        self.dram.touch(reversed(self._keys(request, 0, tokens // self._chunk_tokens)))

    def held_blocks(self) -> list[int]:
        """For tests: blocks that jobs refer to, besides those of live requests."""
        held = [block for job in self._jobs.values() for block in job.blocks]
        for job in self._jobs.values():
            if job.kind is JobKind.LOAD and job.request.aborted:
                held.extend(job.request.blocks)
        return held

    # ---- internals

    def _keys(self, request: RequestState, first: int, end: int) -> tuple[int, ...]:
        size = self._blocks_per_chunk
        return request.hashes[(first + 1) * size - 1 : end * size : size]

    def _next_save(self, request: RequestState) -> int:
        due = (request.saved_chunks + 1) * self._chunk_tokens
        return NEVER if self._prompt_only and due > request.prompt else due

    def _on_its_way(
        self, request: RequestState, first: int, lead: int, keys: tuple[int, ...], transfers: Transfers
    ) -> bool:
        """Whether the store may still supply what follows the ``lead`` keys in DRAM: asked once, then fetched.

        ``first`` is the chunk index of ``keys[0]``.
        """
        if request.asked is None or request.asked[0] > first + lead:
            request.asked = (first + lead, keys[lead:])
            request.store_end = UNKNOWN
        if request.store_end == UNKNOWN:
            asked_from, asked_keys = request.asked
            found = transfers.lookup(request.request_id, asked_keys)
            if found is None:
                return True
            request.store_end = asked_from + found
        if first + lead >= request.store_end or request.fetches >= _MAX_FETCHES:
            return False
        wanted = keys[: request.store_end - first]
        missing = [key for key in wanted if key not in self.dram]
        fit = self.dram.reserve(missing, set(wanted))
        if not fit:
            return False
        request.fetches += 1
        request.fetched.update(missing[:fit])
        request.fetch = self._begin(JobKind.FETCH, tuple(missing[:fit]), request, transfers)
        return True

    def _sources(self, request: RequestState, first: int, keys: Sequence[int], local: int) -> list[Hit]:
        hits: list[Hit] = []
        for i, key in enumerate(keys, first):
            source = STORE if key in request.fetched else DRAM
            start, end = max(local, i * self._chunk_tokens), (i + 1) * self._chunk_tokens
            if hits and hits[-1][2] == source:
                start = hits.pop()[0]
            hits.append((start, end, source))
        return hits

    def _loaded(self, job: _InFlight, ok: int) -> None:
        self.dram.unpin(job.keys)
        for key in job.keys:
            self._loading[key] -= 1
            if not self._loading[key]:
                del self._loading[key]
        self._counters.load_bytes += ok * self._chunk_bytes
        request = job.request
        request.load = None
        request.loaded_chunks = ok
        if ok < len(job.keys):
            self._counters.failed_loads += 1
            self.dram.drop(job.keys[ok:])
            request.compute_rest = True
        if request.aborted:
            self._pool.release(reversed(request.blocks))

    def _saved(self, job: _InFlight, ok: int, transfers: Transfers) -> None:
        self.dram.written(job.keys, ok)
        self._pool.release(reversed(job.blocks))
        self._counters.save_bytes += ok * self._chunk_bytes
        request = job.request
        request.saves -= 1
        if request.released:
            self._orphans -= 1
            request.released = request.saves > 0
        keys = job.keys[: min(ok, self._put_room)]
        if self._shared and keys:
            self._put_room -= len(keys)
            self.dram.pin(keys)
            self._begin(JobKind.PUT, keys, request, transfers)

    def _fetched(self, job_id: int, job: _InFlight, ok: int) -> None:
        self.dram.written(job.keys, ok)
        self._counters.fetch_bytes += ok * self._chunk_bytes
        request = job.request
        short = ok < len(job.keys)
        self._counters.failed_loads += short
        if request.fetch == job_id:
            request.fetch = None
            if short:
                request.fetched.difference_update(job.keys[ok:])
                request.fetches = _MAX_FETCHES

    def _put(self, job: _InFlight, ok: int) -> None:
        self._put_room += len(job.keys)
        self.dram.unpin(job.keys)
        self._counters.put_bytes += ok * self._chunk_bytes

    def _answered(self, request: RequestState) -> None:
        if request.asked is not None:
            request.asked = None
            self._gone.append(request.request_id)

    def _register(
        self, kind: JobKind, keys: tuple[int, ...], request: RequestState, blocks: tuple[int, ...] = ()
    ) -> Job:
        job = Job(self._next_job_id, kind, keys, len(keys) * self._chunk_bytes)
        self._next_job_id += 1
        self._jobs[job.job_id] = _InFlight(kind, keys, request, blocks)
        return job

    def _begin(self, kind: JobKind, keys: tuple[int, ...], request: RequestState, transfers: Transfers) -> int:
        job = self._register(kind, keys, request)
        transfers.start(job)
        return job.job_id
