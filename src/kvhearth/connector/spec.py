"""What vLLM asks for the parts of offloading: upstream's tiering, with a worker for the CPU platform, a region that
leaves nothing behind, and the engine's namespace for the store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvhearth.connector.config import TierConfig, dram_admission
from kvhearth.connector.fingerprint import fingerprint
from kvhearth.connector.host_worker import HostOffloadingWorker
from kvhearth.connector.namespace import Namespace
from kvhearth.connector.region import (
    check_chunks,
    check_room,
    expect_no_name,
    hold,
    remove_stale,
    sweep,
    unlink_name,
)
from kvhearth.connector.stats import CONNECTOR_DEFINITIONS
from kvhearth.errors import UserError


@dataclass(slots=True)
class EngineView:
    """The whole engine's configuration, of which vLLM gives a spec only a part, and the spec made for it."""

    vllm_config: Any
    kv_cache_config: Any
    spec: HearthOffloadingSpec | None = None


_view: ContextVar[EngineView | None] = ContextVar("kvhearth_engine_view", default=None)


@contextlib.contextmanager
def engine_in_view(vllm_config: Any, kv_cache_config: Any) -> Iterator[EngineView]:
    """While a connector is made, its spec finds the engine here and leaves itself."""
    view = EngineView(vllm_config, kv_cache_config)
    token = _view.set(view)
    try:
        yield view
    finally:
        _view.reset(token)


class HearthOffloadingSpec(TieringOffloadingSpec):
    """Modes ``native`` (no secondary tier) and ``shared`` (a `StoreTier`).

    Raises:
        UserError: DRAM too small, shared memory too small, or a setting that makes no sense.
    """

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {**super().build_metric_definitions(extra_config), **CONNECTOR_DEFINITIONS}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._worker: Any = None
        dram_admission(self.extra_config)
        stores = sum(tier.get("type") == "StoreTier" for tier in self.secondary_tier_configs)
        if stores > 1:
            raise UserError(
                f"{stores} StoreTiers",
                where="kv_connector_extra_config.secondary_tiers",
                remedy="give an engine one store",
            )
        self._view = _view.get()
        if self._view is not None:
            self._view.spec = self
        check_chunks(self.num_chunks, int(self.extra_config["cpu_bytes_to_use"]), self.kv_bytes_per_chunk)

    def namespace_of(self, config: TierConfig) -> Namespace:
        """The engine's namespace in a store. Raises UserError when the engine could never share."""
        if self._view is None:
            raise UserError(
                "a StoreTier works under HearthConnector only",
                where="--kv-transfer-config kv_connector",
                remedy='set "kv_connector": "HearthConnector", "kv_connector_module_path": "kvhearth.connector"',
            )
        parallel = self._view.vllm_config.parallel_config
        spread = parallel.nnodes_within_dp > 1 or parallel.distributed_executor_backend == "ray"
        if spread and parallel.world_size > 1:
            raise UserError(
                "the workers of an engine may be on several hosts, and a store is given what the scheduler's host has",
                where="--distributed-executor-backend",
                remedy="use mp on one host, or mode native",
            )
        return fingerprint(
            self._view.vllm_config,
            self._view.kv_cache_config,
            agnostic=self.config.canonical_layout and self.config.parallel.is_parallelism_agnostic,
            weights=config.weights,
            epoch=config.epoch,
        )

    def get_manager(self) -> OffloadingManager:
        """The scheduler's side. The workers have mapped the region before it is made, so its name can go."""
        if self._manager is None:
            check_room(self._engine_id, self.num_chunks * self.kv_bytes_per_chunk)
            manager = super().get_manager()
            region = self._scheduler_mmap
            if region is not None and region._creator:
                manager.shutdown()
                raise RuntimeError(
                    f"the DRAM of engine {self._engine_id} is gone: has another engine the same engine_id?"
                )
            unlink_name(self._engine_id)
            return manager
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """A rank's side: upstream's on CUDA, ROCm and XPU, ours where the KV cache is plain memory."""
        if self._worker is None:
            sweep()
            remove_stale(self._engine_id)
            check_room(self._engine_id, self.num_chunks * self.kv_bytes_per_chunk)
            worker = self._host_worker(kv_caches) if current_platform.is_cpu() else super().get_worker(kv_caches)
            if worker._mmap_region is not None:
                hold(worker._mmap_region)
                expect_no_name(worker._mmap_region)
            self._worker = worker
        return self._worker

    def _host_worker(self, kv_caches: CanonicalKVCaches) -> HostOffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            if self.config.canonical_layout:
                self._validate_canonical_refs(kv_caches)
            return HostOffloadingWorker(
                kv_caches, self.blocks_per_chunk, region, canonical=self.config.canonical_layout
            )
        except Exception:
            region.cleanup()
            raise
