"""The cost model: KV bytes, step and prefill time, transfers and break-even of one model on one kind of engine.

Everything is derived from a `Model`, a `Gpu` and a `Parallelism`; formulas and their sources are in docs/cost.md.
All methods are pure; times are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from kvhearth.cost.catalog import find_gpu, find_link, find_model
from kvhearth.cost.hardware import Gpu, Link
from kvhearth.cost.layout import (
    GATHER_KERNEL_SINCE,
    Parallelism,
    check_split,
    copy_op_bytes,
    parse_vllm_version,
)
from kvhearth.cost.memory import MemoryBudget
from kvhearth.cost.model import WEIGHT_BYTES, Model
from kvhearth.cost.transfer import CURVE_HOST_BANDWIDTH, KERNEL_COPY_BANDWIDTH, transfer_ns
from kvhearth.errors import UserError

KV_BYTES = {"auto": 2, "fp8": 1}
"""Bytes of one KV element by vLLM's ``--kv-cache-dtype``; ``auto`` is the BF16 of the activations."""

ALL_REDUCE_LATENCY_NS = 8_000
"""Fixed time of one all-reduce in a machine, two a layer under tensor parallelism. [?] order of magnitude only."""

MOE_MFU_SHARE = 0.5
"""Routed experts reach this share of ``linear_mfu``. [D] DeepSeek-V3/R1 inference overview (2025-03-01): 73.7 k input
tokens/s a node of 8 H800 with 56.3 % from cache is 0.30 of BF16 peak for 37 B active parameters, half of 0.63."""


class CostModel:
    """What vLLM engines of one shape cost.

    Args:
        model, gpu: catalog names or values.
        parallelism: ranks of one engine.
        links: links of this deployment by name, before the catalog's.
        kv_dtype: ``auto`` (BF16) or ``fp8``.
        weight_dtype: key of `model.WEIGHT_BYTES`; None = as published.
        block_size: tokens of a KV block.
        vllm_version: decides the size of a host↔HBM copy operation.
        hybrid_kv_cache: vLLM's hybrid KV cache manager is on, so sliding-window layers keep only their window.

    Raises:
        UserError: unknown name or dtype, a split that vLLM refuses, a block size below 1.
    """

    def __init__(
        self,
        model: Model | str,
        gpu: Gpu | str,
        parallelism: Parallelism | None = None,
        *,
        links: Mapping[str, Link] | None = None,
        kv_dtype: str = "auto",
        weight_dtype: str | None = None,
        block_size: int = 16,
        vllm_version: str = "0.32",
        hybrid_kv_cache: bool = True,
    ) -> None:
        self.model = find_model(model) if isinstance(model, str) else model
        self.gpu = find_gpu(gpu) if isinstance(gpu, str) else gpu
        self.parallelism = parallelism or Parallelism()
        self.links = dict(links or {})
        self.kv_dtype = kv_dtype
        self.weight_dtype = weight_dtype or self.model.weight_dtype
        self.block_size = block_size
        self.vllm_version = vllm_version
        self.hybrid_kv_cache = hybrid_kv_cache
        self._check()
        self._version = parse_vllm_version(vllm_version)
        self._prepare_kv()
        self._prepare_step()

    def _check(self) -> None:
        if self.kv_dtype not in KV_BYTES:
            raise UserError(repr(self.kv_dtype), where="kv_dtype", remedy=f"choose one of {', '.join(KV_BYTES)}")
        if self.weight_dtype not in WEIGHT_BYTES:
            remedy = f"choose one of {', '.join(WEIGHT_BYTES)}"
            raise UserError(repr(self.weight_dtype), where="weight_dtype", remedy=remedy)
        if self.block_size < 1:
            raise UserError(f"{self.block_size} tokens", where="block_size", remedy="give 1 or more")
        check_split(self.model, self.parallelism)

    # KV bytes

    def _prepare_kv(self) -> None:
        model, tp, pp = self.model, self.parallelism.tp, self.parallelism.pp
        nbytes = KV_BYTES[self.kv_dtype]
        # A rank keeps at least one KV head, and MLA's latent whole: what does not divide is replicated.
        heads_apart = 1 if model.is_mla else min(tp, model.kv_heads)
        layer_bytes = model.kv_elements * nbytes
        rank_layer_bytes = layer_bytes // heads_apart
        kept_window = model.window if self.hybrid_kv_cache else 0
        self._kv_window = kept_window
        window_layers = model.window_layers if kept_window else 0
        full_layers = model.layers - window_layers
        self._kv_full = full_layers * layer_bytes
        self._kv_windowed = window_layers * layer_bytes
        self._rank_full = -(-full_layers // pp) * rank_layer_bytes
        self._rank_windowed = -(-window_layers // pp) * rank_layer_bytes
        self._tp_rank_layer_bytes = rank_layer_bytes
        self._rank_share = -(-model.layers // pp) / model.layers / heads_apart
        # The hybrid manager puts equally many layers of one kind into a block.
        layers_a_block = min(full_layers, window_layers) if window_layers and full_layers else model.layers
        self.copy_op_bytes = copy_op_bytes(
            rank_layer_bytes * self.block_size, -(-layers_a_block // pp), model.is_mla, self._version
        )
        """Bytes of one host↔HBM copy operation on one rank under this vLLM version's layout."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that each further token adds once a sequence is longer than every sliding window: one copy of the KV of
        all layers, whatever the ranks."""
        return self._kv_full

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the KV of one sequence of ``tokens``: all layers, each distinct byte once, as an offload tier stores
        it. Sliding-window layers stop growing at their window when the hybrid manager is on.

        A token is ``2 · layers · kv_heads · head_dim · bytes`` (MLA: ``layers · (kv_lora_rank + rope_dim) · bytes``).
        """
        return self._kv_full * tokens + self._kv_windowed * min(tokens, self._kv_window)

    def kv_bytes_per_rank(self, tokens: int) -> int:
        """The same in the HBM of one rank of the fullest pipeline stage: TP splits KV heads down to one a rank and
        replicates from there; MLA is replicated on each TP rank; PP splits layers."""
        return self._rank_full * tokens + self._rank_windowed * min(tokens, self._kv_window)

    # Steps

    def _prepare_step(self) -> None:
        model, gpu, tp = self.model, self.gpu, self.parallelism.tp
        fp8 = self.weight_dtype == "fp8" and gpu.fp8_flops > 0
        linear_flops_per_ns = (gpu.fp8_flops if fp8 else gpu.bf16_flops) * gpu.linear_mfu * tp / 1e9
        attention_flops_per_ns = gpu.bf16_flops * gpu.attention_mfu * tp / 1e9
        head_flops_per_ns = gpu.bf16_flops * gpu.linear_mfu * tp / 1e9
        bytes_per_ns = gpu.hbm_bandwidth * gpu.mbu / 1e9

        routed = model.active_layer_params - model.dense_params
        flops = 2 * model.dense_params + 2 * routed / MOE_MFU_SHARE
        self._token_ns = flops / linear_flops_per_ns
        self._head_ns = 2 * model.head_params / head_flops_per_ns
        dense_bytes = model.dense_weight_bytes(self.weight_dtype) + model.head_params * 2
        self._dense_weights_ns = dense_bytes / tp / bytes_per_ns
        self._expert_weights_ns = model.expert_weight_bytes(self.weight_dtype) / tp / bytes_per_ns
        self._expert_missed = 1 - model.experts_per_token / model.experts if model.experts else 0.0

        kv_ns = self._tp_rank_layer_bytes / bytes_per_ns
        pair_ns = model.prefill_attention_width / attention_flops_per_ns
        decode_ns = max(kv_ns, 2 * model.decode_attention_width / attention_flops_per_ns)
        self._full_pair_ns, self._window_pair_ns = pair_ns * model.full_layers, pair_ns * model.window_layers
        self._full_kv_ns, self._window_kv_ns = kv_ns * model.full_layers, kv_ns * model.window_layers
        self._full_decode_ns, self._window_decode_ns = decode_ns * model.full_layers, decode_ns * model.window_layers

        self._fixed_ns, self._comm_ns = self._communication()
        self._fixed_ns += gpu.step_overhead_ns

    def _communication(self) -> tuple[int, float]:
        """Fixed ns a step, and ns a token, of all-reduces (TP) and hand-overs between stages (PP); BF16 activations."""
        tp, pp = self.parallelism.tp, self.parallelism.pp
        peer_bytes_per_ns = (self.gpu.peer_bandwidth or self.gpu.host_bandwidth) / 1e9
        token_bytes = self.model.hidden * 2
        reduces = 2 * self.model.layers if tp > 1 else 0
        ring = 2 * (tp - 1) / tp
        token_ns = (reduces * ring + (pp - 1)) * token_bytes / peer_bytes_per_ns
        return (reduces + pp - 1) * ALL_REDUCE_LATENCY_NS, token_ns

    def step_ns(self, prefills: Sequence[tuple[int, int]], n_decode: int, sum_context: int) -> int:
        """Nanoseconds of one mixed step through all layers; 0 for an empty one.

        Args:
            prefills: (new tokens, tokens before them) of each request in prefill.
            n_decode: requests that generate one token each.
            sum_context: tokens of context of those requests in total.

        Matrix products run once for all tokens of the step, so weights are read once: the longer of computing and
        reading. Attention runs a request at a time: for each prefill chunk the longer of computing and reading its KV,
        for decodes the reading of all their context. Kernels follow one another, so these add up, plus communication
        and a fixed overhead. Under PP a step passes all stages; batches do not overlap.
        """
        window = self.model.window
        tokens = n_decode
        attention = self._full_decode_ns * sum_context
        if window:
            # Only the sum of contexts is known: exact when all of them are on one side of the window.
            attention += self._window_decode_ns * min(sum_context, window * n_decode)
        for new, cached in prefills:
            end = cached + new
            tokens += new
            attention += max(self._full_pair_ns * new * (cached + end), self._full_kv_ns * end)
            if window:
                pairs = _window_pairs(end, window) - _window_pairs(cached, window)
                attention += max(self._window_pair_ns * pairs, self._window_kv_ns * min(end, new + window))
        if tokens <= 0:
            return 0
        weights = self._dense_weights_ns
        if self._expert_weights_ns:
            weights += self._expert_weights_ns * (1 - self._expert_missed**tokens)
        linear = self._token_ns * tokens + self._head_ns * (n_decode + len(prefills))
        return self._fixed_ns + ceil(max(linear, weights) + attention + self._comm_ns * tokens)

    def prefill_flops(self, new: int, cached: int = 0) -> int:
        """FLOPs of computing ``new`` tokens (n) after ``cached`` (p):
        ``2 · active_params · n + 4 · layers · q_heads · head_dim · n · (p + n/2)``,
        with sliding-window layers attending to their window only. Splitting a prompt changes nothing.

        ``active_params`` are those of the layers; the output head runs once a request and is in `prefill_ns` only.
        """
        model = self.model
        pairs = model.full_layers * new * (2 * cached + new)
        if model.window:
            windowed = _window_pairs(cached + new, model.window) - _window_pairs(cached, model.window)
            pairs += model.window_layers * windowed
        return 2 * model.active_layer_params * new + model.prefill_attention_width * pairs

    def prefill_ns(self, new: int, cached: int = 0) -> int:
        """Nanoseconds of computing ``new`` tokens of one request after ``cached``, alone on the engine, in one step."""
        return self.step_ns(((new, cached),), 0, 0) if new > 0 else 0

    # Transfers

    def link(self, name: str) -> Link:
        """A link by name: this deployment's, the GPU's own (``pcie``: host↔HBM; ``peer``: GPU↔GPU) or the catalog's.

        Raises:
            UserError: unknown name.
        """
        if name in self.links:
            return self.links[name]
        if name == "pcie":
            return Link("pcie", self.gpu.host_bandwidth, host=True)
        if name == "peer" and self.gpu.peer_bandwidth:
            return Link("peer", self.gpu.peer_bandwidth, latency_ns=ALL_REDUCE_LATENCY_NS)
        return find_link(name)

    def transfer_ns(self, nbytes: int, link: Link | str, op_bytes: int) -> int:
        """Nanoseconds to move ``nbytes`` over one ``link`` in operations of ``op_bytes`` (see `transfer.transfer_ns`).

        Each rank has its own host link: for the KV of a whole engine use `dram_load_ns` and `dram_save_ns`.
        """
        return transfer_ns(nbytes, self.link(link) if isinstance(link, str) else link, op_bytes)

    def dram_load_ns(self, kv_bytes: int) -> int:
        """Nanoseconds from the engine's DRAM into HBM for ``kv_bytes`` of KV (one copy, all layers), ranks in parallel,
        each over its own host link: in operations of ``copy_op_bytes``, or by the gather kernel where that is faster.
        """
        copies = self.dram_save_ns(kv_bytes)
        if self._version < GATHER_KERNEL_SINCE:
            return copies
        bandwidth = KERNEL_COPY_BANDWIDTH * min(1.0, self.gpu.host_bandwidth / CURVE_HOST_BANDWIDTH)
        return min(copies, ceil(kv_bytes * self._rank_share * 1e9 / bandwidth))

    def dram_save_ns(self, kv_bytes: int) -> int:
        """Nanoseconds from HBM to the engine's DRAM for ``kv_bytes`` of KV (one copy, all layers), ranks in parallel,
        each over its own host link in operations of ``copy_op_bytes``."""
        return self.transfer_ns(ceil(kv_bytes * self._rank_share), "pcie", self.copy_op_bytes)

    def break_even_bandwidth(self, tokens: int, cached: int = 0) -> float:
        """Bytes/s above which fetching the KV of ``tokens`` (after ``cached``) takes less time than computing it.

        ``kv_bytes / prefill seconds`` of the same tokens, for the engine as a whole.
        """
        if tokens <= 0:
            raise UserError(f"{tokens} tokens", where="tokens", remedy="give 1 or more")
        return self.kv_bytes(tokens) * 1e9 / self.prefill_ns(tokens, cached)

    # HBM

    def memory_budget(
        self, gpu_memory_utilization: float = 0.92, max_num_batched_tokens: int = 8192, max_num_seqs: int = 256
    ) -> MemoryBudget:
        """HBM of one rank as vLLM divides it at start-up (see `memory.MemoryBudget`)."""
        return MemoryBudget.of(
            self.model,
            self.gpu,
            self.parallelism,
            self.weight_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        )

    def hbm_kv_tokens(
        self, gpu_memory_utilization: float = 0.92, max_num_batched_tokens: int = 8192, max_num_seqs: int = 256
    ) -> int:
        """Length of the longest sequence whose KV fits into HBM; without sliding windows, the KV tokens of any number
        of sequences.

        Raises:
            UserError: weights and reserve leave no room, with the arithmetic.
        """
        free = self.memory_budget(gpu_memory_utilization, max_num_batched_tokens, max_num_seqs).kv_bytes
        short = free // (self._rank_full + self._rank_windowed)
        if short <= self._kv_window or not self._rank_full:
            return short
        return (free - self._rank_windowed * self._kv_window) // self._rank_full

    def hbm_kv_blocks(
        self, gpu_memory_utilization: float = 0.92, max_num_batched_tokens: int = 8192, max_num_seqs: int = 256
    ) -> int:
        """`hbm_kv_tokens` in whole blocks (vLLM's ``num_gpu_blocks``)."""
        return self.hbm_kv_tokens(gpu_memory_utilization, max_num_batched_tokens, max_num_seqs) // self.block_size


def _window_pairs(tokens: int, window: int) -> int:
    """Twice the (query, key) pairs of ``tokens`` queries that see at most ``window`` keys: ``2 ∫ min(x, w) dx``."""
    if tokens <= window:
        return tokens * tokens
    return window * (2 * tokens - window)
