"""The scheduler's side of offloading: upstream's, told whose each request is. Eager admission is upstream's own."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request, RequestStatus

from kvhearth.connector.facts import LoraDigests
from kvhearth.connector.stats import Deltas
from kvhearth.connector.tier import StoreTier

_IDLE_STEP_SECONDS = 0.001
_LOADING_STEP_SECONDS = 0.01
"""Of a step that has nothing to do but to await loads, which go on twice as fast while the scheduler leaves them the
cores. Their end ends it; a request that comes meanwhile waits for no longer than this."""


class HearthScheduler(OffloadingConnectorScheduler):
    """Upstream's scheduler side with eager admission: a chunk is saved as soon as it is computed.

    Args:
        spec: the offloading spec.
        vllm_config: vLLM's configuration.
        kv_cache_config: its KV groups.
        deltas: where to count.
    """

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any, deltas: Deltas) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._deltas = deltas
        self._pool: Any = None
        self._handed_out: set[int] = set()
        self._patience_seconds: float | None = None  # of this step; None: not looked at yet
        self.holdings: Any = None
        """`Holdings` to keep informed, if snapshots are wanted."""
        self._loras = LoraDigests()
        self._tier = next((tier for tier in self.manager.secondary_tiers if isinstance(tier, StoreTier)), None)
        groups = self.config.kv_group_configs
        most = 1 + max(group.group_idx for group in groups)
        self._chunk_tokens, self._chained = [1] * most, [False] * most
        for group in groups:
            self._chunk_tokens[group.group_idx] = group.tokens_per_chunk
            self._chained[group.group_idx] = group.sliding_window_size_in_chunks is None

    def bind_block_pool(self, pool: Any) -> None:
        """vLLM's block pool, once it is made."""
        self._pool = pool
        self._watch(pool)
        if self.holdings is not None:
            self.holdings.bind(pool)

    def _watch(self, pool: Any) -> None:
        """Learn of every block that is handed out. vLLM tells a connector only of those that it schedules itself; under
        MultiConnector another one may have a block overwritten that is still to be saved here."""
        get_new_blocks = pool.get_new_blocks

        def watched(*args: Any, **kwargs: Any) -> Any:
            blocks = get_new_blocks(*args, **kwargs)
            self._handed_out.update(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = watched

    def on_new_request(self, request: Request) -> None:
        """As upstream, with what the tier must know kept beside the request."""
        super().on_new_request(request)
        if self.holdings is not None:
            self.holdings.note(request)
        if self._tier is not None:
            status = self._req_status[request.request_id]
            chains: list[list[OffloadKey]] = [[] for _ in self._chained]
            for group, state in zip(self.config.kv_group_configs, status.group_states, strict=True):
                chains[group.group_idx] = state.offload_keys
            lora = self._loras.of(request.lora_request)
            context = status.req_context
            context.set_state(self._tier.describe(request, context, lora, chains, self._chunk_tokens, self._chained))

    def get_num_new_matched_tokens(self, request: Request, *args: Any, **kwargs: Any) -> tuple[int | None, bool]:
        """As upstream. With nothing to compute, the store's answer is awaited for a moment: it takes less than the step
        after which upstream would look again."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, *args, **kwargs)
        if found[0] is None and self._tier is not None and self._awaited(self._tier):
            found = super().get_num_new_matched_tokens(request, *args, **kwargs)
        return found

    def _awaited(self, tier: StoreTier) -> bool:
        """Whether an answer came; the waits of one step add up to an idle step's length at most."""
        if self._patience_seconds is None:
            is_busy = any(status.req.status == RequestStatus.RUNNING for status in self._req_status.values())
            self._patience_seconds = 0.0 if is_busy else _IDLE_STEP_SECONDS
        if self._patience_seconds <= 0.0:
            return False
        started = time.monotonic()
        came = tier.ask_at_once(self._patience_seconds)
        self._patience_seconds -= time.monotonic() - started
        return came

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """As upstream. A step that computes nothing only waits for transfers: it gives way to the threads that make
        them, which would otherwise have to wring the interpreter from it."""
        self._patience_seconds = None
        self._current_batch_allocated_block_ids |= self._handed_out
        self._handed_out = set()
        meta = super().build_connector_meta(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            if self._tier is not None:
                # The end of a load is told at once; that of a copy between HBM and DRAM shows in the next step only.
                only_loads = self._tier.is_loading and not self._jobs
                self._tier.wait_for_progress(_LOADING_STEP_SECONDS if only_loads else _IDLE_STEP_SECONDS)
            elif self._jobs:
                time.sleep(_IDLE_STEP_SECONDS)
        return meta

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> Any:
        """As upstream, without chunks of a sliding-window group of which the window has left a part behind: upstream
        looks at a chunk's last block only, and would save the rest of a row as whatever was in it."""
        if self._sliding_window_groups and self.config.blocks_per_chunk > 1:
            for req_id in (*scheduler_output.num_scheduled_tokens, *(scheduler_output.finished_req_ids or ())):
                if req_id in self._req_status:
                    self._drop_partial_chunks(self._req_status[req_id])
        return super()._build_store_jobs(scheduler_output)

    def _drop_partial_chunks(self, status: RequestOffloadState) -> None:
        size = self.config.blocks_per_chunk
        for config_idx in self._sliding_window_groups:
            state = status.group_states[config_idx]
            first = 0 if status.req.is_finished() else state.next_stored_chunk_idx
            for end in range((first + 1) * size, len(state.block_ids) + 1, size):
                if 0 in state.block_ids[end - size : end]:
                    state.block_ids[end - 1] = 0

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """As upstream."""
        if self.holdings is not None:
            self.holdings.note(request)
        answer: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        return answer

    def reset_cache(self) -> None:
        """As upstream, and the store's KV of before is not used any more."""
        super().reset_cache()
        for status in self._req_status.values():
            if status.req.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                # It goes on with KV of before, perhaps of other weights, and upstream would save that anew, of a
                # sliding window even from blocks that are someone else's by now.
                status.max_offload_tokens = 0
        if self._tier is not None:
            self._tier.rotate_epoch()
        self._loras.forget()
