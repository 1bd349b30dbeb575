"""An engine without a model and with real KV bytes: vLLM's real Scheduler, our real connector on both sides, real
memory, a real store. What a token's KV would be is a function of the tokens before it, so that before every step each
slot the step would read is compared with what it must hold: wrong KV is seen where it is used.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import xxhash
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvhearth.connector import HearthConnector
from vllm import SamplingParams

BLOCK = 16
WINDOW = 64
_LAYERS = {"full": ("a.0", "a.1"), "window": ("b.0", "b.1")}
_HEAD = 32
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
_names = itertools.count()


@functools.cache
def _base_config() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        args = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=131_072,
            async_scheduling=False,
            prefix_caching_hash_algo="sha256_cbor",
        )
        return args.create_engine_config()


@functools.cache
def _hasher() -> Any:
    init_none_hash(sha256_cbor)
    return get_request_block_hasher(BLOCK, sha256_cbor)


class WrongKv(AssertionError):
    """A step would have read KV that is not what it must be."""


class Rig:
    """One engine.

    Args:
        blocks: KV blocks in HBM.
        dram_chunks: rows in DRAM.
        store: the store's address; None: mode native.
        hybrid: two KV groups, the second with a sliding window of `WINDOW` tokens.
        blocks_per_chunk: KV blocks a chunk.
        weights: what the KV of a token depends on besides the tokens; also names the weights in the namespace.
        tier: further settings of the StoreTier.
        extra: further keys of ``kv_connector_extra_config``.
        batched_tokens: tokens a step.
        beside: another connector's configuration; both then work under vLLM's MultiConnector, this one first.
        tweak: changes the configuration before anything is made of it.
    """

    def __init__(
        self,
        *,
        blocks: int = 40,
        dram_chunks: int = 64,
        store: str | None = None,
        hybrid: bool = False,
        blocks_per_chunk: int = 1,
        weights: str = "rig",
        tier: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        batched_tokens: int = 512,
        engine_id: str | None = None,
        beside: dict[str, Any] | None = None,
        tweak: Callable[[Any], None] = lambda config: None,
    ) -> None:
        self.weights = weights
        self.hybrid = hybrid
        self._groups = ["full", "window"] if hybrid else ["full"]
        layers = sum(len(_LAYERS[group]) for group in self._groups)
        self._page = 2 * BLOCK * _HEAD * 4
        chunk_bytes = layers * self._page * blocks_per_chunk
        settings: dict[str, Any] = {
            "spec_name": "HearthOffloadingSpec",
            "spec_module_path": "kvhearth.connector",
            "cpu_bytes_to_use": dram_chunks * chunk_bytes,
            "blocks_per_chunk": blocks_per_chunk,
            **(extra or {}),
        }
        if store is not None:
            # Deadlines that hold on a machine with other things to do.
            named = {"type": "StoreTier", "module_path": "kvhearth.connector", "address": store, "weights": weights}
            settings["secondary_tiers"] = [{**named, "lookup_timeout_seconds": 2.0, **(tier or {})}]
        self.config = config = copy.copy(_base_config())
        for part in ("scheduler_config", "cache_config", "model_config", "parallel_config"):
            setattr(config, part, copy.copy(getattr(config, part)))
        ours = {
            "kv_connector": "HearthConnector",
            "kv_connector_module_path": "kvhearth.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": settings,
        }
        both = {"connectors": [beside, ours]}
        multi = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
        name = engine_id or f"rig-{os.getpid()}-{next(_names)}"
        config.kv_transfer_config = KVTransferConfig(engine_id=name, **(ours if beside is None else multi))
        config.scheduler_config.max_num_batched_tokens = batched_tokens
        config.scheduler_config.max_num_seqs = 16
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = blocks
        tweak(config)
        self.kv_cache_config = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(list(_LAYERS[group]), _spec(group)) for group in self._groups],
        )
        self.caches = {
            layer: torch.zeros((blocks, self._page // 4), dtype=torch.float32)
            for group in self._groups
            for layer in _LAYERS[group]
        }
        connector = HearthConnector if beside is None else MultiConnector
        self.worker = connector(config, KVConnectorRole.WORKER, self.kv_cache_config)
        self.worker.register_kv_caches(self.caches)
        try:
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=self.kv_cache_config,
                block_size=BLOCK,
                structured_output_manager=StructuredOutputManager(config),
                log_stats=True,
            )
        except BaseException:
            self.worker.shutdown()
            raise
        self.connector = self.scheduler.connector
        hearth = self.connector if beside is None else self.connector._connectors[1]
        self.side = hearth.connector_scheduler
        self.tier = self.side._tier
        self.hits: dict[str, int] = {}
        self.preemptions = 0
        self.stats: dict[str, float] = {}
        self._slots: dict[str, np.ndarray[Any, Any]] = {}
        self._views = {layer: cache.numpy().view(np.uint64) for layer, cache in self.caches.items()}

    # ---- requests

    def submit(
        self, name: str, prompt: Sequence[int], output: int = 2, *, salt: str | None = None, params: Any = None
    ) -> None:
        """A request comes."""
        sampling = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=_hasher(),
            cache_salt=salt,
        )
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def run(self, name: str, prompt: Sequence[int], output: int = 2, **more: Any) -> int:
        """One request to its end; its prompt tokens that came from outside HBM."""
        self.submit(name, prompt, output, **more)
        self.finish()
        return self.hits.get(name, 0)

    def finish(self, seconds: float = 30.0) -> None:
        """Step until nothing is left to do, transfers included."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_unfinished_requests() or self.busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {seconds} s: {self._state()}")
            self.step()
        self.step()

    def step_until(self, reached: Callable[[], Any], seconds: float = 30.0) -> None:
        """Step until the engine is where a test wants it, however long its questions take."""
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not reached after {seconds} s: {self._state()}")
            self.step()

    def _state(self) -> str:
        pool, side = self.scheduler.kv_cache_manager.block_pool, self.side
        waiting = [(r.request_id, r.status.name, r.num_tokens) for r in self.scheduler.waiting]
        skipped = [
            (name, r.status.name)
            for name, r in self.scheduler.requests.items()
            if r.status.name == "WAITING_FOR_REMOTE_KVS"
        ]
        running = [(r.request_id, r.num_computed_tokens) for r in self.scheduler.running]
        return (
            f"waiting {waiting[:4]}, skipped {skipped[:4]}, running {running}, free {pool.get_num_free_blocks()}, "
            f"jobs {sorted(side._jobs)}, tier jobs {sorted(side.manager._jobs)}, stats {self.stats}"
        )

    @property
    def busy(self) -> bool:
        """Transfers are under way."""
        return bool(self.connector.has_pending_push_work())

    def forget_hbm(self) -> None:
        """Empty HBM's prefix cache, as other requests would in time."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()

    def forget_dram(self) -> None:
        """Empty DRAM, as other requests would in time."""
        self.finish()
        self.side.manager.primary_tier.reset_cache()

    # ---- one step, in the order of vLLM's model runner

    def step(self) -> Any:
        """Schedule, move, check, compute, move, report."""
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        self.worker.handle_preemptions(metadata)
        for block_id in output.new_block_ids_to_zero or ():
            for layer in _LAYERS["full"]:
                self.caches[layer][block_id] = 0
        self.worker.start_load_kv(None)
        sampled = [self._compute(name, count) for name, count in output.num_scheduled_tokens.items()]
        self.worker.wait_for_save()
        sending, receiving = self.worker.get_finished(output.finished_req_ids)
        worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        answer = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sending or None,
                finished_recving=receiving or None,
                kv_connector_worker_meta=worker_meta,
            ),
        )
        for request in output.scheduled_new_reqs:
            live = self.scheduler.requests[request.req_id]
            self.hits[request.req_id] = live.prefill_stats.num_external_cached_tokens
        self.preemptions += len(output.preempted_req_ids or ())
        outputs = self.scheduler.update_from_output(output, answer)
        for each in outputs.values():
            if each.scheduler_stats is not None and each.scheduler_stats.kv_connector_stats:
                self._take_stats(each.scheduler_stats.kv_connector_stats)
        return output

    def write(self, name: str, block_ids: Sequence[int], count: int) -> None:
        """Put the KV of a request's first tokens into blocks (of the first KV group), as another engine's would be."""
        wanted = self._content(self.scheduler.requests[name])
        for number, layer in enumerate(_LAYERS["full"]):
            for position in range(count):
                self._views[layer][block_ids[position // BLOCK], _slot(position)] = wanted[position] + np.uint64(number)

    def _take_stats(self, data: dict[str, Any]) -> None:
        for metric, values in data.get("data", {}).items():
            for labels, value in values.items():
                key = metric if not labels else f"{metric}{{{','.join(labels)}}}"
                if isinstance(value, list):
                    self.stats[f"{key}_count"] = self.stats.get(f"{key}_count", 0) + len(value)
                elif data["types"][metric] == "gauge":
                    self.stats[key] = value
                else:
                    self.stats[key] = self.stats.get(key, 0) + value

    def _compute(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        end = request.num_computed_tokens  # vLLM has already counted this step's tokens
        start = end - count
        self._check(name, request, start)
        wanted = self._content(request)
        for kv_group, group in enumerate(self._groups):
            table = self.scheduler.kv_cache_manager.get_block_ids(name)[kv_group]
            for number, layer in enumerate(_LAYERS[group]):
                view = self._views[layer]
                for position in range(start, end):
                    view[table[position // BLOCK], _slot(position)] = wanted[position] + np.uint64(number)
        return [7] if end >= request.num_tokens else []

    def _check(self, name: str, request: Any, computed: int) -> None:
        """Everything this step reads of what was computed before is what it must be."""
        wanted = self._content(request)
        for kv_group, group in enumerate(self._groups):
            table = self.scheduler.kv_cache_manager.get_block_ids(name)[kv_group]
            first = 0 if group == "full" else max(0, computed - WINDOW + 1)
            for number, layer in enumerate(_LAYERS[group]):
                view = self._views[layer]
                for position in range(first, computed):
                    found = view[table[position // BLOCK], _slot(position)]
                    if not (found == wanted[position] + np.uint64(number)).all():
                        raise WrongKv(f"{name}: token {position} of {computed} in {layer}, group {group}")

    def _content(self, request: Any) -> np.ndarray[Any, Any]:
        """For each token a number that stands for its KV."""
        tokens = request.all_token_ids
        known = self._slots.get(request.request_id)
        values = [] if known is None else known.tolist()
        state = values[-1] if values else xxhash.xxh3_64_intdigest(self.weights.encode())
        for token in tokens[len(values) :]:
            state = xxhash.xxh3_64_intdigest(int(token).to_bytes(4, "little"), seed=state)
            values.append(state)
        self._slots[request.request_id] = np.array(values, dtype=np.uint64)
        return self._slots[request.request_id]

    # ---- the end

    def close(self) -> None:
        """Orderly."""
        self.connector.shutdown()
        self.worker.shutdown()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _spec(group: str) -> Any:
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": _HEAD, "dtype": torch.float32}
    return FullAttentionSpec(**shape) if group == "full" else SlidingWindowSpec(**shape, sliding_window=WINDOW)


_SLOT_WORDS = 2 * _HEAD * 4 // 8


def _slot(position: int) -> slice:
    start = (position % BLOCK) * _SLOT_WORDS
    return slice(start, start + _SLOT_WORDS)


def tokens(seed: int, count: int) -> list[int]:
    """A prompt of its own for each seed."""
    return [int(t) for t in np.random.default_rng(seed).integers(8, 500, count)]
