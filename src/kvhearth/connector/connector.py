"""`HearthConnector`: upstream's offloading connector with our scheduler side, a measure of what it costs the scheduler,
and a snapshot of what the engine holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvhearth.connector.config import dram_admission, snapshot_listen
from kvhearth.connector.lazy import LazyScheduler
from kvhearth.connector.scheduler import HearthScheduler
from kvhearth.connector.snapshot import Holdings, SnapshotServer
from kvhearth.connector.spec import engine_in_view
from kvhearth.connector.stats import Deltas
from kvhearth.errors import UserError
from kvhearth.metrics import connector as m

_SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "take_events",
)


class HearthConnector(OffloadingConnector):
    """What ``--kv-transfer-config`` names; docs/connector.md has its settings.

    Raises:
        UserError: a setting makes no sense, or the engine could never share.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        lazy = dram_admission(extra) == "lazy"
        if lazy and not vllm_config.cache_config.enable_prefix_caching:
            raise UserError(
                "'lazy' without prefix caching: blocks have no names then, so nothing would ever be saved",
                where="kv_connector_extra_config.dram_admission",
                remedy="choose eager, or leave out --no-enable-prefix-caching",
            )
        side = LazyScheduler if lazy else HearthScheduler
        with engine_in_view(vllm_config, kv_cache_config) as view:
            super().__init__(vllm_config, role, kv_cache_config)
        self._deltas = Deltas()
        self._seconds = 0.0
        self._snapshot: SnapshotServer | None = None
        if role != KVConnectorRole.SCHEDULER:
            return
        if view.spec is None:
            raise UserError(
                f"{extra.get('spec_name')!r}",
                where="kv_connector_extra_config.spec_name",
                remedy='set "spec_name": "HearthOffloadingSpec", "spec_module_path": "kvhearth.connector"',
            )
        scheduler: Any = side(view.spec, vllm_config, kv_cache_config, self._deltas)
        self.connector_scheduler = scheduler
        for name in _SCHEDULER_HOOKS:
            if hasattr(scheduler, name):
                setattr(scheduler, name, self._timed(getattr(scheduler, name)))
        listen = snapshot_listen(extra, rank=vllm_config.parallel_config.data_parallel_index)
        if listen is not None:
            holdings = Holdings(scheduler, data_parallel_rank=vllm_config.parallel_config.data_parallel_index)
            scheduler.holdings = holdings
            self._snapshot = SnapshotServer(listen, holdings)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM gives the block pool once the cache manager is made."""
        super().bind_gpu_block_pool(gpu_block_pool)
        if isinstance(self.connector_scheduler, HearthScheduler):
            self.connector_scheduler.bind_block_pool(gpu_block_pool)

    def get_kv_connector_stats(self) -> OffloadingConnectorStats | None:
        """Upstream's numbers and ours since the last call."""
        stats: OffloadingConnectorStats | None = super().get_kv_connector_stats()
        if self.connector_scheduler is None:
            return stats
        stats = OffloadingConnectorStats() if stats is None else stats
        self._deltas.level(m.SCHEDULER_SECONDS, self._seconds)
        self._deltas.emit(stats)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """End threads and let go of memory."""
        if self._snapshot is not None:
            self._snapshot.close()
        super().shutdown()

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self._seconds += time.perf_counter() - started

        return call
