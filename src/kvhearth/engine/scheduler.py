"""Which requests get how many tokens in a step: vLLM V1's scheduler, first come first served.

It reads top to bottom as ``Scheduler.schedule`` of vLLM 0.32 (``vllm/v1/core/sched/scheduler.py``), for one KV cache
group of full attention, without speculation and without asynchronous scheduling. It owns the queues and the blocks;
what the scheduled tokens lead to is `EngineModel`'s business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvhearth.engine.accounting import HBM
from kvhearth.engine.block_pool import BlockPool
from kvhearth.engine.offload import Offloader
from kvhearth.engine.ports import Counters, EngineConfig, KvEvent, OffloadMode, Transfers
from kvhearth.engine.request import RequestState
from kvhearth.engine.validate import ensure

Batch = list[tuple[RequestState, int]]
"""Requests and the tokens each computes in a step, in scheduling order."""


class Plan(NamedTuple):
    """What one step does: the batch to run, who had to give way for it, in order, and how long (ns) it waits first for
    transfers that read blocks it needs."""

    batch: Batch
    preempted: list[RequestState]
    waits_ns: int


class _Found(NamedTuple):
    """``blocks`` hit in HBM, and the tokens that DRAM can supply after them."""

    blocks: list[int]
    external: int


_NOTHING = _Found([], 0)


class Scheduler:
    """Queues, block pool and the tiers behind it. A request is in exactly one of waiting, holding and running."""

    def __init__(self, config: EngineConfig, counters: Counters) -> None:
        self.pool = BlockPool(config.num_blocks, config.enable_prefix_caching)
        self.offload = None if config.mode is OffloadMode.NONE else Offloader(config, self.pool, counters)
        self.waiting: deque[RequestState] = deque()
        self.holding: deque[RequestState] = deque()  # waiting with blocks: for a load, or since it is done
        self.running: list[RequestState] = []
        self._aside: list[RequestState] = []  # of the holding ones, those passed over while scheduling
        self._config = config
        self._counters = counters
        # vLLM counts its null block too when it turns the fraction into blocks.
        self._watermark = int(config.watermark * (config.num_blocks + 1))

    def schedule(self, transfers: Transfers) -> Plan:
        """Decide the next step: running requests first; then, if nobody had to give way, waiting ones."""
        if self.offload is not None:
            self.offload.begin_step(transfers)
        batch: Batch = []
        preempted: list[RequestState] = []
        # A lone request has nobody to starve: the cap on long prefills does not apply to it.
        capped = len(self.running) + len(self.waiting) + len(self.holding) > 1
        threshold = self._config.long_prefill_token_threshold if capped else 0
        budget = self._schedule_running(batch, preempted, threshold)
        if not preempted:
            self._schedule_waiting(batch, budget, threshold, transfers)
        if self.offload is None:
            return Plan(batch, preempted, 0)
        return Plan(batch, preempted, self.offload.end_step(batch, preempted, transfers))

    def tell_events(self) -> None:
        """From now on note what enters and leaves the tiers, for `take_events`."""
        self.pool.events = []
        if self.offload is not None:
            self.offload.dram.events = []

    def take_events(self) -> list[KvEvent]:
        """What has been noted since the last call, HBM's first, as in vLLM."""
        events: list[KvEvent] = []
        if self.pool.events:
            events, self.pool.events = self.pool.events, []
        if self.offload is not None and self.offload.dram.events:
            events += self.offload.dram.events
            self.offload.dram.events = []
        return events

    def retire(self, finished: Iterable[RequestState]) -> None:
        """Take requests that are done out of the running ones."""
        gone = set(finished)
        self.running = [request for request in self.running if request not in gone]
        for request in finished:
            self._leave(request, ran=True)

    def drop(self, request: RequestState) -> None:
        """Take a request out wherever it is."""
        ran = request in self.running
        for queue in (self.running, self.holding, self.waiting):
            if request in queue:
                queue.remove(request)
        self._leave(request, ran)

    def check_integrity(self) -> None:
        """For tests: every block and chunk is accounted for.

        Raises:
            AssertionError: one is not.
        """
        queued = [*self.running, *self.holding, *self.waiting]
        ensure(len(queued) == len(set(queued)), "a request is in two queues")
        ensure(not any(request.blocks for request in self.waiting), "a queued request holds blocks")
        references = [block for request in queued for block in request.blocks]
        if self.offload is not None:
            references += self.offload.held_blocks()
            self.offload.dram.check_integrity()
        self.pool.check_integrity(references)

    def _schedule_running(self, batch: Batch, preempted: list[RequestState], threshold: int) -> int:
        """Give each running request its tokens, preempting from the end when blocks run out; returns what is left of
        the token budget."""
        budget = self._config.max_num_batched_tokens
        block_size = self._config.block_size
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            new_tokens = request.tokens - request.computed
            if 0 < threshold < new_tokens:
                new_tokens = threshold
            new_tokens = min(new_tokens, budget)
            end = request.computed + new_tokens
            if end > len(request.blocks) * block_size:
                need = -(-end // block_size) - len(request.blocks)
                if need > self.pool.num_free and not self._make_room(need, request, preempted):
                    break
                new_blocks = self.pool.allocate(need)
                request.blocks += new_blocks
                if self.offload is not None:
                    self.offload.handed_out += new_blocks
            if end // block_size > request.published:
                self._publish(request, end)
            batch.append((request, new_tokens))
            budget -= new_tokens
            index += 1
        return budget

    def _make_room(self, need: int, request: RequestState, preempted: list[RequestState]) -> bool:
        """Preempt the last running request until ``need`` blocks are free. False: ``request`` has to wait."""
        while need > self.pool.num_free:
            victim = self.running.pop()
            self.pool.release(reversed(victim.blocks))
            victim.preempt()
            self.waiting.appendleft(victim)
            preempted.append(victim)
            self._counters.preemptions += 1
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, batch: Batch, budget: int, threshold: int, transfers: Transfers) -> None:
        """Admit waiting requests in order, those that hold blocks first, until one does not fit."""
        running = self.running
        still_holding = self._aside
        still_waiting: list[RequestState] = []
        while budget > 0 and len(running) < self._config.max_num_seqs:
            queue = self.holding or self.waiting
            if not queue:
                break
            request = queue[0]
            if request.load is not None:
                still_holding.append(queue.popleft())
                continue
            if request.loaded:
                self._finish_load(request)
            found = self._look_up(request, transfers)
            if found is None:
                still_waiting.append(queue.popleft())
                continue
            computed = request.computed + len(found.blocks) * self._config.block_size + found.external
            new_tokens = 0
            if not found.external:
                new_tokens = request.tokens - computed
                if 0 < threshold < new_tokens:
                    new_tokens = threshold
                if new_tokens > budget:
                    if not self._config.enable_chunked_prefill:
                        break
                    new_tokens = budget
            if not self._admit(request, found, computed + new_tokens):
                break
            request.computed = computed
            queue.popleft()
            if self.offload is not None:
                self.offload.handed_out += request.blocks
                self.offload.admitted(request, transfers)
                if found.external:
                    self.offload.begin_load(request, found.external)
                    still_holding.append(request)
                    continue
            self._publish(request, computed + new_tokens)
            request.begun_at = computed
            running.append(request)
            batch.append((request, new_tokens))
            budget -= new_tokens
        self.holding.extendleft(reversed(still_holding))
        still_holding.clear()
        self.waiting.extendleft(reversed(still_waiting))

    def _look_up(self, request: RequestState, transfers: Transfers) -> _Found | None:
        """What HBM and the tiers behind it have of a request that has nothing yet; None: not known yet.

        Never the whole prompt from HBM: the last token must be computed, to have something to sample from.
        """
        if request.computed:
            return _NOTHING
        blocks: list[int] = []
        if self._config.enable_prefix_caching:
            blocks = self.pool.longest_hit(request.hashes, (request.tokens - 1) // self._config.block_size)
        if self.offload is None:
            return _Found(blocks, 0)
        external = self.offload.match(request, len(blocks) * self._config.block_size, transfers)
        return None if external is None else _Found(blocks, external)

    def _admit(self, request: RequestState, found: _Found, end: int) -> bool:
        """Take what was found and allocate blocks up to token ``end``, if the whole sequence fits by itself."""
        pool, block_size = self.pool, self._config.block_size
        hit = found.blocks
        held = len(request.blocks) + len(hit)
        extra = pool.count_free(hit) + (self._watermark if self.running else 0)
        if -(-request.tokens // block_size) - held + extra > pool.num_free:
            return False
        need = max(0, -(-end // block_size) - held)
        # A load holds its blocks without getting on: it must not take those that others need to finish their prefill.
        if found.external and need + extra > pool.num_free - self._reserved():
            return False
        if request.computed == 0:
            pool.take(hit)
            request.blocks = hit
            request.published = len(hit)
            request.local = len(hit) * block_size
            request.hits = [(0, request.local, HBM)]
            self._count_lookup(request, found.external)
        request.blocks += pool.allocate(need)
        return True

    def _reserved(self) -> int:
        """Blocks that requests in the middle of a prefill or a load still need for the tokens they have."""
        size = self._config.block_size
        holders = (*self.running, *self.holding, *self._aside)
        return sum(max(0, -(-r.tokens // size) - len(r.blocks)) for r in holders)

    def _publish(self, request: RequestState, end: int) -> None:
        full = end // self._config.block_size
        if full > request.published:
            self.pool.publish(request.blocks, request.hashes, request.published, full, request.request_id)
            request.published = full

    def _finish_load(self, request: RequestState) -> None:
        """What was loaded is there: the prefix cache knows it, and the request goes on behind it."""
        request.loaded = False
        self._counters.reprefills_avoided += 1
        self._counters.reprefill_avoided_tokens += request.computed - request.local
        self._publish(request, request.computed)
        if request.computed == request.tokens:  # the last token must be computed, to have something to sample from
            request.computed -= 1

    def _leave(self, request: RequestState, ran: bool) -> None:
        """The request is over: its blocks go free, unless a load still writes into them."""
        request.over = True
        if self.offload is not None:
            self.offload.over(request, ran)
        if request.load is None:
            self.pool.release(reversed(request.blocks))

    def _count_lookup(self, request: RequestState, external: int) -> None:
        """vLLM's prefix cache counters leave out preempted requests."""
        if request.preemptions:
            return
        if self._config.enable_prefix_caching:
            self._counters.prefix_cache_queries += request.tokens
            self._counters.prefix_cache_hits += request.local
        if self.offload is not None:
            self._counters.external_prefix_cache_queries += request.tokens - request.local
            self._counters.external_prefix_cache_hits += external
