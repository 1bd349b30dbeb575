"""A model's shape and what follows from it: parameters, FLOPs of attention, KV bytes of a layer. No hardware here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "int4": 0.51953125, "mxfp4": 0.53125}
"""Bytes of one matrix weight. int4: a 2-byte scale and a 4-bit zero point for 128 weights (AWQ's usual group);
mxfp4: a 1-byte scale for 32 weights (OCP Microscaling 1.0)."""


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer by the numbers of its ``config.json``.

    Attributes:
        ffn: width of a dense MLP (of the dense layers, for a mixture of experts).
        qkv_bias, o_bias, qk_norm: small tensors that count in ``params``.
        norms: RMS norms of ``hidden`` a layer (2; Gemma 3 has 4).
        experts, experts_per_token, expert_ffn: routed experts of a layer; 0 = dense.
        shared_ffn: width of the experts that every token passes; 0 = none.
        dense_layers: leading layers with a dense MLP although the rest have experts.
        expert_bias: biases in experts and router (gpt-oss); with it come attention sinks, one a head.
        router_bias: a bias an expert for load balancing (DeepSeek-V3).
        kv_lora_rank, rope_dim, nope_dim, v_dim, q_lora_rank: multi-head latent attention; ``kv_lora_rank`` 0 = none.
        window, window_layers: sliding attention window in tokens, and how many layers have it.
        weight_dtype: of the published checkpoint; key of `WEIGHT_BYTES`. 4-bit formats quantise the experts
            (or, in a dense model, the layers' matrices); embeddings stay BF16 in all of them.
    """

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    kv_lora_rank: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    q_lora_rank: int = 0
    window: int = 0
    window_layers: int = 0
    weight_dtype: str = "bf16"

    @staticmethod
    def from_hf_config(config: str | Path | Mapping[str, Any], name: str = "") -> Model:
        """Read a Hugging Face ``config.json`` (path, folder or parsed mapping).

        Raises:
            UserError: unreadable file, unknown architecture, or a missing or unusable field, by name.
        """
        from kvhearth.cost.hf_config import read_hf_config

        return read_hf_config(config, name)

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def moe_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.layers - self.window_layers

    @property
    def kv_elements(self) -> int:
        """Numbers that one token leaves in one layer's KV cache: K and V of each head, or MLA's latent and rope."""
        if self.is_mla:
            return self.kv_lora_rank + self.rope_dim
        return 2 * self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Matrix weights of one layer's attention."""
        if not self.is_mla:
            return self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)
        q_width = self.q_heads * (self.nope_dim + self.rope_dim)
        q = self.hidden * self.q_lora_rank + self.q_lora_rank * q_width if self.q_lora_rank else self.hidden * q_width
        kv = self.hidden * (self.kv_lora_rank + self.rope_dim)
        kv += self.kv_lora_rank * self.q_heads * (self.nope_dim + self.v_dim)
        return q + kv + self.q_heads * self.v_dim * self.hidden

    @property
    def expert_params(self) -> int:
        """Matrix weights of all routed experts, all layers."""
        return self.moe_layers * self.experts * 3 * self.hidden * self.expert_ffn

    @property
    def dense_params(self) -> int:
        """Matrix weights of the layers that every token passes: attention, dense MLPs, shared experts, routers."""
        mlp_layers = self.dense_layers if self.experts else self.layers
        mlp = mlp_layers * 3 * self.hidden * self.ffn
        beside_experts = self.moe_layers * (3 * self.hidden * self.shared_ffn + self.hidden * self.experts)
        return self.layers * self.attention_params + mlp + beside_experts

    @property
    def active_layer_params(self) -> int:
        """Matrix weights in the layers that one token passes: the ``active_params`` of the prefill formula.

        Embedding and output head are left out: a lookup, and one product for a whole prompt.
        """
        routed = self.expert_params * self.experts_per_token // self.experts if self.experts else 0
        return self.dense_params + routed

    @property
    def head_params(self) -> int:
        """The output head (also the embedding, where tied)."""
        return self.vocab * self.hidden

    @property
    def active_params(self) -> int:
        """As models publish it: all that one generated token passes, output head included, embedding lookup not."""
        return self.active_layer_params + self.head_params

    @property
    def params(self) -> int:
        """All parameters, norms and biases included."""
        return self.dense_params + self.expert_params + self.embedding_params + self._small_params

    @property
    def embedding_params(self) -> int:
        """Embedding and output head as stored."""
        return self.head_params if self.tied_embeddings else 2 * self.head_params

    @property
    def _small_params(self) -> int:
        layer = self.norms * self.hidden
        if self.qkv_bias:
            layer += self.head_dim * (self.q_heads + 2 * self.kv_heads)
        if self.o_bias:
            layer += self.hidden
        if self.qk_norm:
            layer += 2 * self.head_dim
        if self.is_mla:
            layer += self.q_lora_rank + self.kv_lora_rank
        total = self.layers * layer + self.hidden
        if self.expert_bias:
            per_expert = 2 * self.expert_ffn + self.hidden + 1
            total += self.moe_layers * self.experts * per_expert + self.layers * self.q_heads
        if self.router_bias:
            total += self.moe_layers * self.experts
        return total

    @property
    def prefill_attention_width(self) -> int:
        """Numbers multiplied for each (query, key) pair and layer in prefill: ``2 · q_heads · head_dim``, or MLA's
        un-absorbed heads."""
        if self.is_mla:
            return self.q_heads * (self.nope_dim + self.rope_dim + self.v_dim)
        return 2 * self.q_heads * self.head_dim

    @property
    def decode_attention_width(self) -> int:
        """The same in decode, where MLA works on the latent itself."""
        if self.is_mla:
            return self.q_heads * (2 * self.kv_lora_rank + self.rope_dim)
        return 2 * self.q_heads * self.head_dim

    def dense_weight_bytes(self, dtype: str) -> float:
        """Bytes of what every token passes in the layers, all ranks together."""
        quantised = self.dense_params * WEIGHT_BYTES[dtype]
        if self.experts and dtype in ("mxfp4", "int4"):
            quantised = self.dense_params * 2.0
        return quantised + self._small_params * 2.0

    def expert_weight_bytes(self, dtype: str) -> float:
        """Bytes of all routed experts, all ranks together."""
        return self.expert_params * WEIGHT_BYTES[dtype]

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights, all ranks together."""
        return round(
            self.dense_weight_bytes(dtype) + self.expert_weight_bytes(dtype) + self.embedding_params * 2.0,
        )
