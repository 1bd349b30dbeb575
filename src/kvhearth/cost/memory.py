"""How vLLM divides one rank's HBM at start-up: weights, reserve, and what is left for KV."""

from __future__ import annotations

from typing import NamedTuple

from kvhearth.cost.hardware import Gpu
from kvhearth.cost.layout import Parallelism
from kvhearth.cost.model import Model
from kvhearth.errors import UserError

FIXED_RESERVE_BYTES = 1_500_000_000
"""CUDA context, NCCL buffers, workspaces and CUDA graphs of a rank. [?] what start-up logs in public vLLM issues show
lies between 1 and 2.5 GB."""


class MemoryBudget(NamedTuple):
    """Bytes of one rank of the fullest pipeline stage: ``usable = weights + reserve + kv_bytes``."""

    usable: int
    weights: int
    reserve: int
    kv_bytes: int

    @staticmethod
    def of(
        model: Model,
        gpu: Gpu,
        parallelism: Parallelism,
        weight_dtype: str,
        *,
        gpu_memory_utilization: float,
        max_num_batched_tokens: int,
        max_num_seqs: int,
    ) -> MemoryBudget:
        """Divide ``gpu.device_bytes · gpu_memory_utilization``.

        Raises:
            UserError: a utilisation outside (0, 1], or nothing left for KV, with the arithmetic.
        """
        if not 0 < gpu_memory_utilization <= 1:
            raise UserError(
                f"{gpu_memory_utilization}", where="gpu_memory_utilization", remedy="give a share above 0 and up to 1"
            )
        usable = int(gpu.device_bytes * gpu_memory_utilization)
        weights = _rank_weight_bytes(model, parallelism, weight_dtype)
        reserve = _reserve_bytes(model, parallelism.tp, max_num_batched_tokens, max_num_seqs)
        free = usable - weights - reserve
        if free <= 0:
            raise UserError(
                f"{model.name} does not fit: {model.weight_bytes(weight_dtype) / 1e9:.1f} GB of {weight_dtype} weights "
                f"on tp {parallelism.tp} x pp {parallelism.pp} are {weights / 1e9:.1f} GB a GPU, plus "
                f"{reserve / 1e9:.1f} GB reserve, of {usable / 1e9:.1f} GB usable on {gpu.name} "
                f"({gpu_memory_utilization:g} of {gpu.device_bytes / 1e9:.1f} GB)",
                where="gpu",
                remedy="use more GPUs an engine (tp, pp), a larger GPU, smaller weights or a smaller model",
            )
        return MemoryBudget(usable, weights, reserve, free)


def _rank_weight_bytes(model: Model, parallelism: Parallelism, dtype: str) -> int:
    layers = model.dense_weight_bytes(dtype) + model.expert_weight_bytes(dtype)
    stage_layers = -(-model.layers // parallelism.pp)
    ends = model.embedding_params if parallelism.pp == 1 else model.head_params
    return round((layers * stage_layers / model.layers + ends * 2.0) / parallelism.tp)


def _reserve_bytes(model: Model, tp: int, batched_tokens: int, seqs: int) -> int:
    """Fixed part, plus the peak of a profiling step in BF16: four hidden states and the MLP's two inputs and output a
    token, and FP32 logits with one copy for each sequence. [D] from the shapes."""
    ffn = max(model.ffn, model.experts_per_token * model.expert_ffn + model.shared_ffn)
    token = 2 * (4 * model.hidden + 3 * ffn // tp)
    return FIXED_RESERVE_BYTES + batched_tokens * token + seqs * model.vocab * 8
