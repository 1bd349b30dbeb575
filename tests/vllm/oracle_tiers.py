"""vLLM 0.32's real Scheduler with its real offloading connector and tiering, transfers scripted in steps.

The worker is played here: it starts saves one step late and waits for the jobs that it is told to flush, as
``OffloadingConnectorWorker`` does. The store behind DRAM is a `ScriptedTier`, which behaves as `kvhearth.connector`'s.
"""

from __future__ import annotations

import functools
import mmap
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvhearth.connector.lazy import LazyScheduler
from kvhearth.connector.stats import Deltas
from kvhearth.engine import EngineConfig, Job, JobKind, OffloadMode

from .oracle import VllmScheduler
from .oracle_script import Script, ScriptedMoves, ScriptedStore, Started

_BYTES_PER_TOKEN = 2 * 32 * 4  # K and V of the oracle's cache: one head of 32 floats


class _InOrder(dict[str, None]):
    """A set that keeps its order: vLLM's sets of ids have none that two runs would share."""

    def add(self, request_id: str) -> None:
        self[request_id] = None


class _LazyScheduler(LazyScheduler):
    """kvhearth's lazy admission, which takes blocks in no order that two runs would share, and sleeps when idle."""

    def _overwritten(self, allocated: Any) -> Any:
        return super()._overwritten(sorted(allocated))

    build_connector_meta = OffloadingConnectorScheduler.build_connector_meta


class TieredVllmScheduler(VllmScheduler):
    """vLLM's Scheduler in mode native or shared; with lazy admission, with kvhearth's `LazyScheduler` in it.

    Attributes:
        started: transfers that this step started.
        moved: chunks of finished transfers, by kind.
    """

    def __init__(self, config: EngineConfig, script: Script, stored: set[int]) -> None:
        chunk_bytes = _BYTES_PER_TOKEN * config.block_size * config.blocks_per_chunk
        row_bytes = -(-chunk_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        extra: dict[str, Any] = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": row_bytes * config.dram_chunks,
            "blocks_per_chunk": config.blocks_per_chunk,
            "offload_prompt_only": config.offload_prompt_only,
        }
        if config.mode is OffloadMode.SHARED:
            extra["secondary_tiers"] = [{"type": "ScriptedTier", "module_path": __name__, "oracle": self}]
        transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            engine_id=uuid.uuid4().hex,
            kv_connector_extra_config=extra,
        )
        lazy = config.dram_admission == "lazy"
        side = functools.partial(_LazyScheduler, deltas=Deltas()) if lazy else OffloadingConnectorScheduler
        with mock.patch.object(offloading_connector, "OffloadingConnectorScheduler", side):
            super().__init__(config, transfer_config)
        self.started: list[Started] = []
        self.moved: Counter[JobKind] = Counter()
        self.external_queries = self.external_hits = self.external_hits_store = 0
        self.store = ScriptedStore(script, stored)
        self._names: dict[bytes, int] = {}
        self.now = 0
        self.dram_capacity = config.dram_chunks
        self._blocks_per_chunk = config.blocks_per_chunk
        self._moves = ScriptedMoves(script)
        self._late: dict[int, Any] = {}
        self._under_way: dict[int, tuple[JobKind, str, int]] = {}
        self._offloading = self.scheduler.connector.connector_scheduler
        assert self._offloading.manager.primary_tier._num_chunks == config.dram_chunks
        self._next_started: list[Started] = []
        if lazy:
            self._offloading.bind_block_pool(self._pool)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests()

    @property
    def dram_usage(self) -> float:
        return len(self._offloading.manager.primary_tier._policy.chunks) / self.dram_capacity

    def close(self) -> None:
        self.scheduler.shutdown()

    def begin_step(self, step: int) -> None:
        self.now = step
        self.store.begin_step(step)
        self.started, self._next_started = self._next_started, []

    def name(self, keys: Collection[bytes], context: ReqContext) -> tuple[int, ...]:
        """Our names of the request's chunks, in chain order."""
        in_order = sorted(keys, key=lambda key: context.get_offload_key_position(key) or 0)
        return tuple(self._names[key] for key in in_order)

    def name_chunks(self, tokens: Sequence[int], names: Sequence[int]) -> None:
        """Say how the engine model names the chunks of a request with these tokens, prompt and output."""
        size = self._blocks_per_chunk
        for block_hash, name in zip(self.hash_blocks(tokens)[size - 1 :: size], names, strict=True):
            self._names[make_offload_key(block_hash, 0)] = name

    def start_in_store(self, kind: JobKind, job: TransferJob, step: int) -> None:
        """``step``: the first in whose beginning the engine model could have started it."""
        keys = self.name(job.keys, job.req_context)
        (self.started if step == self.now else self._next_started).append(Started(kind, keys))
        self.store.start(Job(job.job_id, kind, keys, 0), step)

    def transfer(self, output: Any) -> KVConnectorOutput:
        self.scheduler.finished_req_ids = _InOrder()
        meta = output.kv_connector_metadata
        flush = sorted(meta.jobs_to_flush or ())
        self._late.update((job_id, meta.store_jobs.pop(job_id)) for job_id in flush if job_id in meta.store_jobs)
        for job_id, job in self._late.items():
            self._start(JobKind.SAVE, job_id, job.req_id)
        self._late = dict(meta.store_jobs)
        for job_id in flush:
            self._moves.flush(job_id, self.now)
        for job_id, job in meta.load_jobs.items():
            self._start(JobKind.LOAD, job_id, job.req_id)
        over = self._moves.take_over(self.now + 1)
        loaded = []
        for job_id in over:
            kind, request_id, chunks = self._under_way.pop(job_id)
            self.moved[kind] += chunks
            if kind is JobKind.LOAD:
                loaded.append(request_id)
        return KVConnectorOutput(
            finished_recving=loaded,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(over, 1)),
        )

    def count(self, stats: Any) -> None:
        super().count(stats)
        external = stats.connector_prefix_cache_stats
        if external is not None:
            self.external_queries += external.queries
            self.external_hits += external.hits
            self.external_hits_store += external.hits_by_source.get(CacheHitSource.DISK, 0)

    def _start(self, kind: JobKind, job_id: int, request_id: str) -> None:
        context = self._offloading._req_status[request_id].req_context
        keys = self.name(self._offloading._jobs[job_id].keys, context)
        self.started.append(Started(kind, keys))
        self._under_way[job_id] = (kind, request_id, len(keys))
        self._moves.start(job_id, self.now)


class ScriptedTier(SecondaryTierManager):
    """The store as a tier, with the rules of kvhearth's: see `kvhearth.connector.tier`."""

    medium = Medium.STORAGE

    def __init__(self, *args: Any, oracle: TieredVllmScheduler, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._oracle = oracle
        self._answers: dict[str, dict[bytes, bool | None]] = {}
        self._promoted: dict[str, Counter[bytes]] = {}
        self._asking: dict[str, list[bytes]] = {}
        self._asked: list[tuple[int, dict[bytes, bool | None], dict[bytes, bool]]] = []
        self._contexts: dict[str, ReqContext] = {}
        self._jobs: dict[int, tuple[TransferJob, list[bytes]]] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._contexts[req_context.req_id] = req_context
        self._promoted[req_context.req_id] = Counter()
        return RequestOffloadingContext(policy=OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._answers.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        for ready, answers, found in list(self._asked):
            if ready <= self._oracle.now:
                answers.update({k: has for k, has in found.items() if answers[k] is None})
                self._asked.remove((ready, answers, found))
        promoted = self._promoted[req_context.req_id]
        most = max(1, self._oracle.dram_capacity // 2)
        if promoted[key] >= 2 or (not promoted[key] and sum(n > 0 for n in promoted.values()) >= most):
            return LookupResult.MISS
        answers = self._answers.setdefault(req_context.req_id, {})
        if key not in answers:
            answers[key] = None
            self._asking.setdefault(req_context.req_id, []).append(key)
        if answers[key] is None:
            return LookupResult.RETRY
        if not answers[key]:
            return LookupResult.MISS
        promoted[key] += 1
        return LookupResult.HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        oracle = self._oracle
        for req_id, keys in self._asking.items():
            names = oracle.name(keys, self._contexts[req_id])
            leading = oracle.store.leading(names)
            found = {key: i < leading for i, key in enumerate(keys)}
            self._asked.append((oracle.store.ask(oracle.now), self._answers[req_id], found))
        self._asking.clear()
        for req_id in context.preempted_req_ids:
            self._answers.pop(req_id, None)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._jobs[job_metadata.job_id] = (job_metadata, list(job_metadata.keys))
        self._oracle.start_in_store(JobKind.FETCH, job_metadata, self._oracle.now)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._jobs[job_metadata.job_id] = (job_metadata, list(job_metadata.keys))
        self._oracle.start_in_store(JobKind.PUT, job_metadata, self._oracle.now + 1)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for job_id, keys_ok in self._oracle.store.take_over():
            job, keys = self._jobs.pop(job_id)
            self._oracle.moved[JobKind.FETCH if job.is_promotion else JobKind.PUT] += keys_ok
            if job.is_promotion and keys_ok < len(keys) and job.req_context.req_id in self._answers:
                self._answers[job.req_context.req_id].update(dict.fromkeys(keys[keys_ok:], False))
            results.append(JobResult(job_id, success=keys_ok == len(keys), successful_keys=keys[:keys_ok]))
        return results

    def drain_jobs(self) -> None:
        raise NotImplementedError
