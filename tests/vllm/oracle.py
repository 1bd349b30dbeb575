"""vLLM 0.32's real Scheduler without a model, driven step by step: what conformance tests and benchmarks compare with.

Needs the environment that `tests/vllm/install.sh` makes.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvhearth.engine import EngineConfig
from vllm import SamplingParams

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
_SAMPLED_TOKEN = 7


@functools.cache
def _vllm_config() -> Any:
    """One VllmConfig for all shapes: making one takes long, and the scheduler reads only a few of its fields."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_MODEL))
        args = EngineArgs(
            model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=131_072, async_scheduling=False
        )
        return args.create_engine_config()


@functools.cache
def _hasher(block_size: int) -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(block_size, sha256)


class VllmScheduler:
    """vLLM's Scheduler with the limits of an `EngineConfig`, sampling one fixed token for each request that is due."""

    def __init__(self, config: EngineConfig, kv_transfer_config: Any = None) -> None:
        vllm_config = copy.copy(_vllm_config())
        vllm_config.kv_transfer_config = kv_transfer_config
        vllm_config.scheduler_config = scheduler = copy.copy(vllm_config.scheduler_config)
        vllm_config.cache_config = cache = copy.copy(vllm_config.cache_config)
        vllm_config.model_config = model = copy.copy(vllm_config.model_config)
        scheduler.max_num_seqs = config.max_num_seqs
        scheduler.max_num_batched_tokens = config.max_num_batched_tokens
        scheduler.max_num_scheduled_tokens = None
        scheduler.enable_chunked_prefill = config.enable_chunked_prefill
        scheduler.long_prefill_token_threshold = config.long_prefill_token_threshold
        scheduler.watermark = config.watermark
        model.max_model_len = config.max_model_len
        cache.enable_prefix_caching = config.enable_prefix_caching
        cache.block_size = config.block_size
        cache.num_gpu_blocks = config.num_blocks + 1  # vLLM keeps block 0 as its null block
        spec = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_size=32, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(
                num_blocks=config.num_blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
            ),
            block_size=config.block_size,
            structured_output_manager=StructuredOutputManager(vllm_config),
            log_stats=True,
        )
        self._pool = self.scheduler.kv_cache_manager.block_pool
        self._block_size = config.block_size
        hashes = config.enable_prefix_caching or kv_transfer_config is not None
        self._hasher = _hasher(config.block_size) if hashes else None
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0

    def submit(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> None:
        self.scheduler.add_request(self._request(request_id, prompt, output_tokens))

    def hash_blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """vLLM's hashes of the full blocks of these tokens."""
        return list(self._request("", tokens, 1).block_hashes)

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    @property
    def blocks_used(self) -> int:
        return self._pool.num_gpu_blocks - 1 - self._pool.get_num_free_blocks()

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The request's blocks, counted from 0 without the null block."""
        return tuple(block - 1 for block in self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def step(self) -> tuple[dict[str, int], list[str]]:
        """Tokens scheduled by request, in scheduling order, and the ids preempted."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        transferred = self.transfer(output)
        scheduled = dict(output.num_scheduled_tokens)
        preempted = sorted(output.preempted_req_ids or ())
        sampled = []
        for request_id in scheduled:
            request = scheduler.requests[request_id]
            sampled.append([_SAMPLED_TOKEN] if request.num_computed_tokens >= request.num_tokens else [])
        outputs = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=list(scheduled),
                req_id_to_index={request_id: i for i, request_id in enumerate(scheduled)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
                kv_connector_output=transferred,
            ),
        )
        for stats in [out.scheduler_stats for out in outputs.values() if out.scheduler_stats is not None]:
            self.count(stats)
        return scheduled, preempted

    def _request(self, request_id: str, prompt: Sequence[int], output_tokens: int) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=output_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def transfer(self, output: Any) -> Any:
        """What a worker would do for the connector in this step, of which there is none here."""
        return None

    def count(self, stats: Any) -> None:
        """Add up what a step reports."""
        self.prefix_cache_queries += stats.prefix_cache_stats.queries
        self.prefix_cache_hits += stats.prefix_cache_stats.hits
