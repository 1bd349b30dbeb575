"""The store as a tier behind the engine's DRAM: vLLM's tier interface on one side, lookups and transfers on the other.

Every method runs on the scheduler's thread and only moves entries between tables; the waiting is done by the threads
of `lookups` and `transfers`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvhearth.connector.admission import StoreAdmission
from kvhearth.connector.config import TierConfig
from kvhearth.connector.facts import RequestFacts, Wishes, read_wishes
from kvhearth.connector.lookups import Lookups
from kvhearth.connector.namespace import Namespace, group_number
from kvhearth.connector.puts import PutItem
from kvhearth.connector.register import PoolRegister
from kvhearth.connector.stats import DEFINITIONS, Deltas
from kvhearth.connector.transfers import Finished, Transfers
from kvhearth.metrics import connector as m
from kvhearth.store.client.client import StoreClient
from kvhearth.store.open import open_store
from kvhearth.store.ring.client import StoreRing

_MOST_PROMOTIONS = 2

_log = logging.getLogger(__name__)


class StoreTier(SecondaryTierManager):
    """One engine's view of the store. Settings are those of `TierConfig`, from the ``secondary_tiers`` entry.

    Raises:
        UserError: a setting makes no sense, or the engine could never share.
    """

    medium = Medium.STORAGE
    # Of vLLM's names for where cached tokens came from, "disk" would be wrong. (0.31 has none.)
    cache_hit_source = getattr(SecondaryTierManager, "cache_hit_source", None)

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.REMOTE
        self._config = config = TierConfig.of(settings)
        self._namespace: Namespace = offloading_spec.namespace_of(config)
        self._epoch_serial = 0
        self._ask_client = _open(config, config.lookup_timeout_seconds, connections=1)
        self._move_client = _open(config, config.load_timeout_seconds, connections=config.connections + 2)
        self._register = PoolRegister(self._move_client, config.pool, self._namespace)
        try:
            self._register.check_at_start()
        except BaseException:
            self._ask_client.close()
            self._move_client.close()
            raise
        rows = primary_kv_view.cast("B")
        self._row_bytes = self.block_size_bytes
        self._most_parked = max(1, len(rows) // self._row_bytes // 2)
        self._progress = threading.Event()
        self._lookups = Lookups(
            self._ask_client, timeout_seconds=config.lookup_timeout_seconds, progress=self._progress
        )
        self._transfers = Transfers(
            self._move_client,
            rows,
            self._row_bytes,
            connections=config.connections,
            load_timeout_seconds=config.load_timeout_seconds,
            put_timeout_seconds=config.put_timeout_seconds,
            progress=self._progress,
        )
        self._register.start()
        self._jobs: dict[int, tuple[TransferJob, list[OffloadKey]]] = {}
        self._done: list[JobResult] = []
        self._admission = StoreAdmission(second_sight=config.store_admission == "second-sight")
        self._seen_timeouts = 0
        self._differing: list[str] = []
        self._stats = Deltas()
        _log.info("chunks of this engine are named %s in the store %s", self._namespace.digest(), config.address)

    # ---- requests

    def describe(
        self, request: Any, context: ReqContext, lora: str | None, chains: Any, chunk_tokens: Any, chained: Any
    ) -> RequestFacts:
        """What the connector knows of a request that has come, for its ``context``. ``lora`` None: share nothing."""
        serial = -1 if lora is None else self._epoch_serial
        return RequestFacts(
            request.request_id,
            serial,
            self._namespace.key_prefix(lora or ""),
            group_number(request.cache_salt),
            context.get_state(Wishes) or Wishes(),
            chains,
            chunk_tokens,
            chained,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Whole requests are offered where chunks that vLLM has already may be new to the store."""
        wishes = read_wishes(req_context.kv_transfer_params)
        req_context.set_state(wishes)
        whole = wishes.pin or self._admission.wants_whole_requests
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL if whole else OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        for req_id in context.preempted_req_ids:
            self._lookups.forget(req_id)
        self._lookups.flush()

    # ---- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        facts = self._facts(req_context)
        if facts is None:
            return LookupResult.MISS
        promoted = facts.promoted.get(key, 0)
        # A chunk that was fetched and lost again before its use, or one more of a chain longer than DRAM, would push
        # out what was fetched before it, for ever.
        if promoted >= _MOST_PROMOTIONS or (not promoted and len(facts.promoted) >= self._most_parked):
            return LookupResult.MISS
        found = self._lookups.ask(
            req_context.req_id,
            key,
            facts.key_prefix + key,
            end_token=req_context.get_offload_key_position(key) or 0,
            promise=facts.wishes.promise,
        )
        if found is None:
            return LookupResult.RETRY
        if not found:
            self._admission.lacks(facts.key_prefix + key)
            return LookupResult.MISS
        facts.promoted[key] = promoted + 1
        self._admission.has(facts.key_prefix + key)
        return LookupResult.HIT

    def ask_at_once(self, seconds: float) -> bool:
        """Send what was asked so far in this step, if anything; whether an answer came within ``seconds``."""
        self._progress.clear()
        return self._lookups.flush() and self._progress.wait(seconds)

    @property
    def is_loading(self) -> bool:
        """Whether the store is being read for a request."""
        return self._transfers.is_loading

    # ---- jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        facts = self._facts(job_metadata.req_context)
        if facts is None:
            self._refuse(job_metadata, keys)
            return
        self._jobs[job_metadata.job_id] = (job_metadata, keys)
        names = [facts.key_prefix + key for key in keys]
        self._transfers.load(job_metadata.job_id, names, job_metadata.chunk_ids.tolist())

    def submit_store(self, job_metadata: TransferJob) -> None:
        items = self._to_put(job_metadata)
        if not items:
            self._done.append(JobResult(job_metadata.job_id, success=True, transfer_time=0.0, transfer_bytes=0))
            return
        self._jobs[job_metadata.job_id] = (job_metadata, [OffloadKey(item.key) for item in items])
        self._transfers.put(job_metadata.job_id, items)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        done, self._done = self._done, []
        for ended in self._transfers.finished():
            job, keys = self._jobs.pop(ended.job_id)
            done.append(self._loaded(job, keys, ended) if ended.is_load else self._put(keys, ended))
        return done

    def drain_jobs(self) -> None:
        """No row is touched after this; at most the deadline of what is under way."""
        self._transfers.drain()
        self._lookups.clear()

    def shutdown(self) -> None:
        self._lookups.close()
        self._transfers.close()
        self._register.close()
        self._ask_client.close()
        self._move_client.close()

    def wait_for_progress(self, seconds: float) -> None:
        """For a step that has nothing to compute: wait a moment for an answer or the end of a job."""
        self._progress.wait(seconds)
        self._progress.clear()

    def rotate_epoch(self) -> None:
        """The engine's cache was reset, perhaps for new weights: from now on it shares only with itself, and requests
        that began before share nothing."""
        self._epoch_serial += 1
        self._namespace = self._namespace.with_epoch(uuid.uuid4().hex)
        self._register.change(self._namespace)
        self._lookups.clear()
        self._admission.forget()
        self._stats.add(m.EPOCHS)

    # ---- what happened

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return DEFINITIONS

    def get_stats(self) -> OffloadingConnectorStats | None:
        up = not (self._ask_client.is_down or self._move_client.is_down)
        if self._lookups.counts["timeout"] != self._seen_timeouts:
            self._seen_timeouts = self._lookups.counts["timeout"]
            self._admission.doubt()
        stats = OffloadingConnectorStats()
        for outcome, count in self._lookups.counts.items():
            self._stats.level(m.LOOKUPS, count, outcome)
        for outcome, count in self._lookups.awaited.items():
            self._stats.level(m.AWAITED, count, outcome)
        self._stats.level_gauge(m.STORE_UP, float(up))
        self._stats.level_gauge(m.PUT_QUEUE, self._transfers.queued_put_bytes)
        differing = self._register.differing
        if differing != self._differing:
            for name in {*differing, *self._differing}:
                self._stats.level_gauge(m.MISMATCH, float(name in differing), name)
            self._differing = differing
        self._stats.emit(stats)
        return stats

    # ---- internals

    def _facts(self, req_context: ReqContext) -> RequestFacts | None:
        facts: RequestFacts | None = req_context.get_state(RequestFacts)
        return facts if facts is not None and facts.epoch_serial == self._epoch_serial else None

    def _refuse(self, job: TransferJob, keys: Collection[OffloadKey]) -> None:
        self._done.append(JobResult(job.job_id, success=False))
        self._stats.add(m.GET_FAILURES, len(keys), "stale")

    def _to_put(self, job: TransferJob) -> list[PutItem]:
        facts = self._facts(job.req_context)
        if facts is None:
            self._stats.add(m.PUT_CHUNKS, len(job.keys), "stale")
            return []
        ordered = sorted(
            (
                ((job.req_context.get_offload_key_position(key) or 0), get_offload_group_idx(key), key, int(chunk_id))
                for key, chunk_id in zip(job.keys, job.chunk_ids, strict=True)
            ),
        )
        room = max(self._config.max_put_bytes, self._row_bytes) - self._transfers.queued_put_bytes
        room //= self._row_bytes
        items: list[PutItem] = []
        for end_token, kv_group, key, chunk_id in ordered:
            name = facts.key_prefix + key
            outcome = None if facts.wishes.pin else self._admission.reason_to_skip(name, facts.req_id)
            if outcome is None and len(items) >= room:
                outcome = "dropped"  # the tail of the chain, as what follows it is of no use without it
                self._admission.reoffer()
            if outcome is not None:
                self._stats.add(m.PUT_CHUNKS, 1, outcome)
                continue
            position = end_token // facts.chunk_tokens[kv_group] - 1
            items.append(
                PutItem(
                    name,
                    chunk_id,
                    facts.parent_of(kv_group, position),
                    max(0, position),
                    facts.group,
                    self._namespace.epoch_number,
                    facts.wishes.pin,
                )
            )
        return items

    def _loaded(self, job: TransferJob, keys: list[OffloadKey], ended: Finished) -> JobResult:
        came = [key for key, outcome in zip(keys, ended.outcomes, strict=True) if outcome == "ok"]
        if len(came) < len(keys):
            gone = [key for key, outcome in zip(keys, ended.outcomes, strict=True) if outcome != "ok"]
            self._lookups.set_missing(job.req_context.req_id, gone)
            self._admission.doubt()
            for outcome in ended.outcomes:
                if outcome != "ok":
                    self._stats.add(m.GET_FAILURES, 1, outcome)
        nbytes = len(came) * self._row_bytes
        self._stats.add(m.GET_BYTES, nbytes)
        return JobResult(
            ended.job_id,
            success=len(came) == len(keys),
            successful_keys=came,
            transfer_time=ended.seconds,
            transfer_bytes=nbytes,
        )

    def _put(self, names: list[OffloadKey], ended: Finished) -> JobResult:
        for name, outcome in zip(names, ended.outcomes, strict=True):
            self._stats.add(m.PUT_CHUNKS, 1, outcome)
            if outcome in ("stored", "present"):
                self._admission.has(name)
            elif outcome == "failed":
                self._admission.doubt()
        self._stats.add(m.PUT_BYTES, ended.nbytes)
        return JobResult(
            ended.job_id,
            success="failed" not in ended.outcomes,
            transfer_time=ended.seconds,
            transfer_bytes=ended.nbytes,
        )


def _open(config: TierConfig, timeout_seconds: float, *, connections: int) -> StoreClient | StoreRing:
    return open_store(
        config.address,
        copies=config.copies,
        timeout_seconds=timeout_seconds,
        where="kv_connector_extra_config.secondary_tiers[kvhearth].address",
        user=config.user,
        password=config.password,
        tls=config.tls,
        shared_memory=config.shared_memory,
        max_connections=connections,
    )
