"""Lazy admission: a chunk is saved only when its KV blocks are about to be used for something else."""

from __future__ import annotations

import itertools
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState, TransferJobStatus
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.request import Request, RequestStatus

from kvhearth.connector.facts import RequestFacts
from kvhearth.connector.scheduler import HearthScheduler
from kvhearth.connector.stats import Deltas
from kvhearth.metrics import connector as m


class _Chunk(NamedTuple):
    """A chunk in HBM that may have to be saved.

    Attributes:
        key: its name.
        config_idx: which of the offloaded KV groups.
        place: in the request's chain, from 0.
        block_ids: its KV blocks.
        hashes: what the block pool calls their contents; anything else there now means they are gone.
        context: vLLM's offloading context of the request that computed it last.
    """

    key: OffloadKey
    config_idx: int
    place: int
    block_ids: tuple[int, ...]
    hashes: tuple[Any, ...]
    context: ReqContext


@dataclass(slots=True)
class _Told:
    """Of a request what an event tells of its chunks; the request itself may hold images, and is let go."""

    block_hashes: Any
    all_token_ids: Any
    lora_request: Any


@dataclass(slots=True)
class _Nobody:
    """Stands for a request in upstream's tables while chunks of finished requests are saved."""

    request_id: str
    kv_transfer_params: None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    status: RequestStatus = RequestStatus.FINISHED_STOPPED

    def is_finished(self) -> bool:
        return True


class LazyScheduler(HearthScheduler):
    """Lazy admission: nothing leaves HBM while nothing is pushed out of it.

    A chunk is saved when a block of its is handed out anew: the copy is made before the step's forward pass, which
    waits for it, as upstream does for a block that is still being saved. So nothing is lost, preemption victims
    included. To have fewer such waits, chunks whose blocks are next in line are saved ahead.
    """

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any, deltas: Deltas) -> None:
        super().__init__(spec, vllm_config, kv_cache_config, deltas)
        self._chunk_of: dict[int, _Chunk] = {}
        self._names = itertools.count()
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        block = min(group.tokens_per_block for group in self.config.kv_group_configs)
        self._ahead = max(1, tokens // block)
        self._allocated_since_scan = 0

    def bind_block_pool(self, pool: Any) -> None:
        """As above; a small pool is watched a small way ahead."""
        super().bind_block_pool(pool)
        self._ahead = max(1, min(self._ahead, pool.num_gpu_blocks // 8))

    def on_new_request(self, request: Request) -> None:
        """As above, with what events will tell of it."""
        super().on_new_request(request)
        if self._events_tracker.self_describing_enabled:
            told = _Told(request.block_hashes, request.all_token_ids, request.lora_request)
            self._req_status[request.request_id].req_context.set_state(told)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """As upstream. What was loaded is noted too: DRAM may have dropped it by the time HBM does."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._note_afresh(request.request_id)

    def reset_cache(self) -> None:
        """As above; what HBM holds counts for nothing any more."""
        self._chunk_of.clear()
        super().reset_cache()

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        jobs: dict[int, TransferJob] = self._save_pinned(scheduler_output)
        allocated = self._current_batch_allocated_block_ids
        if allocated:
            self._save(self._overwritten(allocated), jobs, now=True)
            self._allocated_since_scan += len(allocated)
        for req_id in scheduler_output.preempted_req_ids or ():
            self._note_afresh(req_id)
        self._note(scheduler_output)
        if 2 * self._allocated_since_scan >= self._ahead:
            self._allocated_since_scan = 0
            self._save(self._next_in_line(), jobs, now=False)
        return jobs

    def _save_pinned(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        """Requests that pin their chunks want them in the store now: eager admission for these."""

        def pins(req_id: str) -> bool:
            status = self._req_status.get(req_id)
            facts = status.req_context.get_state(RequestFacts) if status is not None else None
            return facts is not None and facts.wishes.pin

        scheduled = {name: count for name, count in scheduler_output.num_scheduled_tokens.items() if pins(name)}
        finished = {name for name in scheduler_output.finished_req_ids or () if pins(name)}
        if not scheduled and not finished:
            return {}
        theirs = replace(scheduler_output, num_scheduled_tokens=scheduled, finished_req_ids=finished)
        jobs: dict[int, TransferJob] = super()._build_store_jobs(theirs)
        return jobs

    def _note_afresh(self, req_id: str) -> None:
        for state in self._req_status[req_id].group_states if req_id in self._req_status else ():
            state.next_stored_chunk_idx = 0

    def _note(self, scheduler_output: SchedulerOutput) -> None:
        """Remember the chunks that this step makes whole."""
        pool_blocks = self._pool.blocks
        size = self.config.blocks_per_chunk
        for req_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            status = self._req_status.get(req_id)
            if status is None:
                continue
            tokens = self._calc_num_offloadable_tokens(status, status.req.num_computed_tokens + scheduled)
            for config_idx, (group, state) in enumerate(
                zip(self.config.kv_group_configs, status.group_states, strict=True)
            ):
                end = status.storable_chunks(group, state, tokens)
                while state.next_stored_chunk_idx < end:
                    index = state.next_stored_chunk_idx
                    block_ids = tuple(state.block_ids[index * size : (index + 1) * size])
                    hashes = tuple(pool_blocks[block_id].block_hash for block_id in block_ids)
                    if 0 not in block_ids and (None in hashes or hashes[-1] != state.offload_keys[index]):
                        break  # not in the prefix cache yet: look again in the next step
                    state.next_stored_chunk_idx += 1
                    if 0 not in block_ids:  # else out of the sliding window
                        chunk = _Chunk(
                            state.offload_keys[index],
                            config_idx,
                            index,
                            block_ids,
                            hashes,
                            status.req_context,
                        )
                        self._chunk_of.update(dict.fromkeys(block_ids, chunk))

    def _overwritten(self, allocated: set[int]) -> list[_Chunk]:
        """Chunks of which this step takes a block away. Until the forward pass, all of it is still there."""
        found: dict[OffloadKey, _Chunk] = {}
        gone = []
        for block_id in sorted(allocated):
            chunk = self._chunk_of.get(block_id)
            if chunk is None or self._intact(chunk, block_id):
                continue  # never noted, or a prefix hit
            gone.append(block_id)
            if all(self._holds(chunk, other, allocated) for other in chunk.block_ids):
                found[chunk.key] = chunk
        for block_id in gone:
            del self._chunk_of[block_id]
        return list(found.values())

    def _next_in_line(self) -> list[_Chunk]:
        """Chunks whose blocks are next to be handed out."""
        found: dict[OffloadKey, _Chunk] = {}
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        for _ in range(self._ahead):
            if block is None or block is queue.fake_free_list_tail:
                break
            chunk = self._chunk_of.get(block.block_id)
            if chunk is not None and all(self._holds(chunk, block_id, ()) for block_id in chunk.block_ids):
                found[chunk.key] = chunk
            block = block.next_free_block
        return list(found.values())

    def _holds(self, chunk: _Chunk, block_id: int, allocated: Container[int]) -> bool:
        """Whether a block still has the chunk's KV: nothing else was noted of it since, and it is either in the prefix
        cache as it was, or was handed out in this very step."""
        return self._chunk_of.get(block_id) is chunk and (block_id in allocated or self._intact(chunk, block_id))

    def _intact(self, chunk: _Chunk, block_id: int) -> bool:
        return bool(self._pool.blocks[block_id].block_hash == chunk.hashes[chunk.block_ids.index(block_id)])

    def _save(self, chunks: list[_Chunk], jobs: dict[int, TransferJob], *, now: bool) -> None:
        """Make store jobs, one for the chunks of each request; ``now``: before this step's forward pass."""
        by_request: dict[int, list[_Chunk]] = {}
        for chunk in chunks:
            by_request.setdefault(id(chunk.context), []).append(chunk)
        for group in by_request.values():
            self._save_of_one(sorted(group, key=lambda c: (c.config_idx, c.place)), jobs, now=now)

    def _save_of_one(self, chunks: list[_Chunk], jobs: dict[int, TransferJob], *, now: bool) -> None:
        status = self._stand_in(chunks[0].context)
        context = status.req_context
        for chunk in chunks:
            position = (chunk.place + 1) * self.config.kv_group_configs[chunk.config_idx].tokens_per_chunk
            context.set_offload_key_position(chunk.key, position)
        output = self.manager.prepare_store([chunk.key for chunk in chunks], context)
        new = set(output.keys_to_store) if output is not None else set()
        saved = [chunk for chunk in chunks if chunk.key in new]
        if saved:
            told = chunks[0].context.get_state(_Told)
            for chunk in saved if told is not None else ():
                group = self.config.kv_group_configs[chunk.config_idx]
                self._events_tracker.record_store(told, group, chunk.place, chunk.key)
            job_id = self._generate_job_id()
            jobs[job_id] = TransferJob(req_id=context.req_id, src_spec=self._source(saved), dst_spec=output.store_spec)
            self._open_job(job_id, status, saved, now=now)
            self._deltas.add(m.LAZY_CHUNKS, len(saved), "at" if now else "ahead")
        self.manager.on_request_finished(context)
        if not saved:
            del self._req_status[context.req_id]

    def _stand_in(self, original: ReqContext) -> RequestOffloadState:
        """Upstream's tables want a request for every job; the one that computed the chunks may be gone."""
        name = f"kvhearth-lazy-{next(self._names)}"
        context = ReqContext(req_id=name)
        facts = original.get_state(RequestFacts)
        if facts is not None:
            context.set_state(facts)
        status = RequestOffloadState(
            config=self.config,
            req=_Nobody(name),
            req_context=context,
            offloading_context=self.manager.on_new_request(context),
            finished_signaled=True,
        )
        self._req_status[name] = status
        return status

    def _source(self, chunks: list[_Chunk]) -> GPULoadStoreSpec:
        """The blocks to read; chunks of one KV group need not be neighbours, so their blocks are given whole."""
        block_ids: list[int] = []
        sizes, firsts = [], []
        for config_idx in range(len(self.config.kv_group_configs)):
            of_group = [chunk for chunk in chunks if chunk.config_idx == config_idx]
            block_ids += [block_id for chunk in of_group for block_id in chunk.block_ids]
            sizes.append(len(of_group) * self.config.blocks_per_chunk)
            firsts.append(of_group[0].place * self.config.blocks_per_chunk if of_group else 0)
        return GPULoadStoreSpec(block_ids, group_sizes=sizes, block_indices=firsts)

    def _open_job(self, job_id: int, status: RequestOffloadState, chunks: list[_Chunk], *, now: bool) -> None:
        block_ids = [block_id for chunk in chunks for block_id in chunk.block_ids]
        status.transfer_jobs.add(job_id)
        self._jobs[job_id] = TransferJobStatus(
            req_id=status.req_context.req_id,
            pending_count=self.config.num_workers,
            keys={chunk.key for chunk in chunks},
            is_store=True,
            fenced_block_ids=block_ids,
        )
        for block_id in block_ids:
            self._block_id_to_pending_jobs.setdefault(block_id, set()).add(job_id)
        if now:
            self._current_batch_jobs_to_flush.add(job_id)
