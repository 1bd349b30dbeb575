"""KV beyond HBM: what DRAM and the store hold of a request, and the transfers that fetch, load, save and put it.

It plans and keeps count; the `Transfers` port moves. Follows, call by call, vLLM 0.32's ``OffloadingConnector`` with
its ``TieringOffloadingManager`` (``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``,
``vllm/v1/kv_offload/tiering/manager.py``), but for what would never end there: a request of a single token, which vLLM
would load again and again, is computed. What bounds fetches is in `store_tier`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.engine.accounting import DRAM, STORE, Hit
from kvhearth.engine.block_pool import BlockPool
from kvhearth.engine.dram import DramTier
from kvhearth.engine.jobs import InFlight, Jobs
from kvhearth.engine.ports import Counters, EngineConfig, Job, JobKind, KvEvent, KvTier, OffloadMode, Transfers
from kvhearth.engine.request import RequestState
from kvhearth.engine.saves import Saves
from kvhearth.engine.store_tier import StoreTier
from kvhearth.engine.validate import ensure


class Offloader:
    """DRAM tier and jobs of one engine, in mode native or shared.

    In flight at most: one load a request, and saves, fetches and puts of the chunks that DRAM has.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, counters: Counters) -> None:
        self.dram = DramTier(config.dram_chunks)
        self.handed_out: list[int] = []
        """Blocks that this step gave to requests, new ones and hits: the scheduler notes them."""
        self._pool = pool
        self._counters = counters
        self._deduplicate_loads = config.enable_prefix_caching
        self._blocks_per_chunk = config.blocks_per_chunk
        self._chunk_tokens = config.block_size * config.blocks_per_chunk
        self._chunk_bytes = config.chunk_bytes
        self._jobs = Jobs(config.chunk_bytes)
        self._saves = Saves(config, pool, self.dram, self._jobs, self._poll)
        self._store = StoreTier(config.dram_chunks) if config.mode is OffloadMode.SHARED else None
        self._loads: list[Job] = []
        self._loading: set[int] = set()
        self._promoting: dict[RequestState, list[int]] = {}
        self._over: list[tuple[RequestState, bool]] = []
        self._store_news: list[tuple[int, int]] = []
        self._polled = False

    @property
    def busy(self) -> bool:
        """Something is in flight, or waits for the next step."""
        return bool(self._jobs or self._over)

    @property
    def has_news(self) -> bool:
        """The next step may do more than this one could, without anything further happening."""
        at_once = self._store is not None and self._store.answered_at_once
        return bool(self._store_news) or self._saves.unstarted or at_once

    def first_save(self, prompt_tokens: int) -> int:
        """Computed tokens at which a new request's first save is due."""
        return self._saves.first_due(prompt_tokens)

    # ---- once a step

    def take_in(self, transfers: Transfers) -> None:
        """Take in finished jobs. What the store did is only noted, and taken in when DRAM is first asked (`_poll`)."""
        for job_id, keys_ok in transfers.finished():
            job = self._jobs[job_id]
            ok = max(0, min(keys_ok, len(job.keys)))
            if job.kind is JobKind.FETCH or job.kind is JobKind.PUT:
                self._store_news.append((job_id, ok))
                continue
            ensure(ok == len(job.keys), "a transfer between HBM and DRAM failed")
            self._jobs.over(job_id)
            if job.kind is JobKind.LOAD:
                self._loaded(job)
            else:
                self._saved(job_id, job, transfers)

    def begin_step(self, transfers: Transfers) -> None:
        """`take_in`, then start the saves that the last step made possible."""
        self.take_in(transfers)
        self._saves.start(transfers)

    def end_step(
        self, batch: Sequence[tuple[RequestState, int]], preempted: Sequence[RequestState], transfers: Transfers
    ) -> int:
        """The step's schedule is made: start what it needs, plan the saves that it makes possible.

        Returns:
            How long the step waits, in ns, for saves whose blocks it gave to others.
        """
        self._poll()
        self._polled = False
        self._start_fetches(transfers)
        if self._store is not None:
            self._store.send(transfers)
            for request in preempted:
                self._store.forget(request, transfers)
        self._plan_saves(batch, preempted)
        for request, ran in self._over:
            self._end(request, ran, transfers)
        self._over.clear()
        self.handed_out.clear()
        waits_ns = self._saves.wait(transfers)
        for job in self._loads:
            transfers.start(job)
        self._loads.clear()
        return waits_ns

    # ---- into HBM

    def match(self, request: RequestState, local: int, transfers: Transfers) -> int | None:
        """Tokens that DRAM can supply beyond ``local`` (computed tokens found in HBM; whole blocks).

        0 or at least a chunk. None: not known yet, or on its way from the store; ask again in the next step.
        """
        if request.saves:
            return None
        size = self._chunk_tokens
        first, end = local // size, request.tokens // size
        if end * size - local < size or request.tokens == 1:
            return 0
        self._poll()
        if self._store is not None and request.batches:
            self._store.take_answers(request, transfers)
        keys = self._keys(request, first, end)
        lead, pending = 0, False
        for index, key in enumerate(keys, first):
            ready = self.dram.ready(key)
            if ready:
                lead += 1
            elif ready is None and not self._may_come(request, index, key):
                break
            else:
                pending = True
        if pending:
            return None
        found = (first + lead) * size - local
        if found < size:
            return 0
        if self._deduplicate_loads and self._loading and not self._loading.isdisjoint(keys[:lead]):
            return None
        return found

    def begin_load(self, request: RequestState, found: int) -> None:
        """Load what `match` found; the request's blocks are allocated. The job starts at the end of the step."""
        local = request.local
        first, end = local // self._chunk_tokens, (local + found) // self._chunk_tokens
        keys = self._keys(request, first, end)
        self.dram.pin(keys)
        self._loading.update(keys)
        request.touched.update(range(first, end))
        job = self._jobs.register(JobKind.LOAD, keys, request)
        request.load = job.job_id
        self._loads.append(job)
        hits = self._sources(request, first, keys, local)
        request.hits += hits
        if not request.preemptions:
            from_store = sum(stop - start for start, stop, source in hits if source == STORE)
            self._counters.external_prefix_cache_hits_store += from_store
        self._saves.loaded(request, end)

    def admitted(self, request: RequestState, transfers: Transfers) -> None:
        """The request is past its lookups."""
        if self._store is not None:
            self._store.forget(request, transfers)

    def over(self, request: RequestState, ran: bool) -> None:
        """The request has ended, ``ran`` or waiting, and lets its blocks go. What is left to save is saved in the next
        step."""
        self._over.append((request, ran))
        self._saves.over(request)

    def held_blocks(self) -> list[int]:
        """For tests: blocks that jobs refer to, besides those of live requests."""
        aborted = [job.request for job in self._jobs if job.kind is JobKind.LOAD and job.request.over]
        return [block for request in aborted for block in request.blocks]

    # ---- internals

    def _keys(self, request: RequestState, first: int, end: int) -> tuple[int, ...]:
        size = self._blocks_per_chunk
        return request.hashes[(first + 1) * size - 1 : end * size : size]

    def _poll(self) -> None:
        """Take in what the store did: once between two ends of steps, as vLLM asks its tiers no oftener."""
        if self._polled:
            return
        self._polled = True
        for job_id, ok in self._store_news:
            job = self._jobs.over(job_id)
            if job.kind is JobKind.FETCH:
                self._fetched(job, ok)
            else:
                self.dram.unpin(job.keys)
                self._counters.put_bytes += ok * self._chunk_bytes
                if self.dram.events is not None and ok:
                    self.dram.events.append(KvEvent(KvTier.STORE, True, job.keys[:ok]))
        self._store_news.clear()

    def _may_come(self, request: RequestState, index: int, key: int) -> bool:
        """Whether the store may supply a chunk that DRAM lacks. Has it fetched, once the store is known to have it."""
        if self._store is None:
            return False
        has = self._store.lookup(request, key)
        if not has:
            return has is None
        request.touched.add(index)
        if not self.dram.reserve((key,), ()):
            return False
        request.fetched.add(key)
        self._promoting.setdefault(request, []).append(key)
        return True

    def _start_fetches(self, transfers: Transfers) -> None:
        for request, keys in self._promoting.items():
            transfers.start(self._jobs.register(JobKind.FETCH, tuple(keys), request))
        self._promoting.clear()

    def _fetched(self, job: InFlight, ok: int) -> None:
        came, failed = job.keys[:ok], job.keys[ok:]
        self.dram.written(came)
        self._counters.fetch_bytes += ok * self._chunk_bytes
        if failed and self._store is not None:
            self.dram.lost(failed)
            self._counters.failed_loads += 1
            job.request.fetched.difference_update(failed)
            self._store.failed(job.request, failed)

    def _sources(self, request: RequestState, first: int, keys: Sequence[int], local: int) -> list[Hit]:
        hits: list[Hit] = []
        for i, key in enumerate(keys, first):
            source = STORE if key in request.fetched else DRAM
            start, end = max(local, i * self._chunk_tokens), (i + 1) * self._chunk_tokens
            if hits and hits[-1][2] == source:
                start = hits.pop()[0]
            hits.append((start, end, source))
        return hits

    def _loaded(self, job: InFlight) -> None:
        self.dram.unpin(job.keys)
        self._loading.difference_update(job.keys)
        self._counters.load_bytes += len(job.keys) * self._chunk_bytes
        request = job.request
        request.load = None
        request.loaded = True
        if request.over:
            self._pool.release(reversed(request.blocks))

    def _plan_saves(self, batch: Sequence[tuple[RequestState, int]], preempted: Sequence[RequestState]) -> None:
        saves = self._saves
        saves.handed_out(self.handed_out)
        for chunks in saves.pushed_out(self.handed_out):
            saves.rescue(chunks, now=True)
        for request in preempted:
            saves.preempted(request)
        for request, new_tokens in batch:
            if request.computed + new_tokens >= request.next_save:
                saves.due(request, request.computed + new_tokens)
        for chunks in saves.next_in_line():
            saves.rescue(chunks, now=False)

    def _saved(self, job_id: int, job: InFlight, transfers: Transfers) -> None:
        self._saves.saved(job_id, job)
        self._counters.save_bytes += len(job.keys) * self._chunk_bytes
        if self._store is not None:
            self.dram.pin(job.keys)
            transfers.start(self._jobs.register(JobKind.PUT, job.keys, job.request))

    def _end(self, request: RequestState, ran: bool, transfers: Transfers) -> None:
        """Save what is left of a request that is over. Its chunks count as used now, the first ones last, as they are
        shared most."""
        if ran and request.computed >= request.next_save:
            self._saves.due_at_end(request, self.handed_out)
        size = self._blocks_per_chunk
        self.dram.touch(request.hashes[(i + 1) * size - 1] for i in sorted(request.touched, reverse=True))
        if self._store is not None:
            self._store.forget(request, transfers)
