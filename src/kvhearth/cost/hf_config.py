"""Reads a Hugging Face ``config.json`` into a `Model`. Knows the architectures below and refuses others by field name.

Defaults are those of each architecture's configuration class in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth.cost.model import Model
from kvhearth.errors import UserError

ARCHITECTURES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "gpt_oss", "gemma3_text",
)  # fmt: skip
"""Values of ``model_type`` that are understood (``gemma3`` and others by their nested ``text_config``)."""

GEMMA3_DEFAULTS = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 26, "sliding_window": 4096, "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}  # fmt: skip
"""What Gemma 3 checkpoints leave out of their files (transformers' ``Gemma3TextConfig``)."""


def read_hf_config(config: str | Path | Mapping[str, Any], name: str = "") -> Model:
    """See `Model.from_hf_config`."""
    raw, default_name = (config, "") if isinstance(config, Mapping) else _load(Path(config))
    quantisation = raw.get("quantization_config")
    name = name or str(raw.get("_name_or_path") or "") or default_name or "model"
    if isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]
        quantisation = raw.get("quantization_config", quantisation)
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"architecture {kind!r} is not understood",
            where="model_type",
            remedy=f"use one of {', '.join(ARCHITECTURES)}, or describe the model in numbers",
        )
    fields = {**GEMMA3_DEFAULTS, **raw} if kind == "gemma3_text" else dict(raw)
    shape = _common(fields)
    shape |= _small_tensors(kind, fields)
    if kind in ("qwen3_moe", "deepseek_v3", "kimi_k2", "gpt_oss"):
        shape |= _experts(kind, fields)
    if kind in ("deepseek_v3", "kimi_k2"):
        shape |= _mla(fields)
    shape |= _sliding(kind, fields, shape["layers"])
    return Model(name=name, weight_dtype=_weight_dtype(quantisation), **shape)


def _load(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror or error}", where=str(file), remedy="give a config.json or its folder"
        ) from error
    except ValueError as error:
        raise UserError(f"no JSON: {error}", where=str(file), remedy="give a Hugging Face config.json") from error
    if not isinstance(raw, dict):
        raise UserError("no JSON object", where=str(file), remedy="give a Hugging Face config.json")
    return raw, file.resolve().parent.name


def _int(fields: Mapping[str, Any], field: str, default: int | None = None, least: int = 1) -> int:
    value = fields.get(field)
    if value is None:
        if default is None:
            raise UserError("missing", where=field, remedy="give the model's complete config.json")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{value!r} is no whole number of at least {least}", where=field, remedy="correct config.json")
    return value


def _list(fields: Mapping[str, Any], field: str) -> list[Any] | None:
    value = fields.get(field)
    if value is not None and not isinstance(value, list):
        raise UserError(f"{value!r} is no list", where=field, remedy="correct config.json")
    return value


def _only(fields: Mapping[str, Any], field: str, understood: object) -> None:
    """Refuse a field whose other values would change the shape in a way not modelled."""
    value = fields.get(field, understood)
    if value != understood and value is not None:
        raise UserError(
            f"{value!r} is not understood (only {understood!r} is)",
            where=field,
            remedy="describe the model in numbers instead",
        )


def _common(fields: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _int(fields, "hidden_size"), _int(fields, "num_attention_heads")
    kv_heads = _int(fields, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"{kv_heads} KV heads do not divide {heads} attention heads",
            where="num_key_value_heads",
            remedy="correct config.json",
        )
    _only(fields, "mlp_bias", False)
    return {
        "layers": _int(fields, "num_hidden_layers"),
        "hidden": hidden,
        "q_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": _int(fields, "head_dim", hidden // heads),
        "ffn": _int(fields, "intermediate_size"),
        "vocab": _int(fields, "vocab_size"),
        "tied_embeddings": bool(fields.get("tie_word_embeddings", False)),
    }


def _small_tensors(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(fields.get("attention_bias", kind == "gpt_oss"))
    return {
        "qkv_bias": bias or kind == "qwen2",
        "o_bias": bias and kind != "qwen2",
        "qk_norm": kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        "norms": 4 if kind == "gemma3_text" else 2,
    }


def _experts(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "qwen3_moe":
        _only(fields, "decoder_sparse_step", 1)
        count, width = _int(fields, "num_experts"), _int(fields, "moe_intermediate_size")
        extra = {"dense_layers": len(_list(fields, "mlp_only_layers") or ())}
    elif kind == "gpt_oss":
        count, width = _int(fields, "num_local_experts"), _int(fields, "intermediate_size")
        extra = {"expert_bias": True}
    else:
        _only(fields, "moe_layer_freq", 1)
        count, width = _int(fields, "n_routed_experts"), _int(fields, "moe_intermediate_size")
        extra = {
            "shared_ffn": width * _int(fields, "n_shared_experts", 0, least=0),
            "dense_layers": _int(fields, "first_k_dense_replace", 0, least=0),
            "router_bias": fields.get("topk_method", "noaux_tc") == "noaux_tc",
        }
    each = _int(fields, "num_experts_per_tok")
    if each > count:
        raise UserError(f"{each} of {count} experts a token", where="num_experts_per_tok", remedy="correct config.json")
    return {"experts": count, "experts_per_token": each, "expert_ffn": width, **extra}


def _mla(fields: Mapping[str, Any]) -> dict[str, Any]:
    rope, nope = _int(fields, "qk_rope_head_dim"), _int(fields, "qk_nope_head_dim")
    return {
        "kv_lora_rank": _int(fields, "kv_lora_rank"),
        "q_lora_rank": _int(fields, "q_lora_rank", 0),
        "rope_dim": rope,
        "nope_dim": nope,
        "v_dim": _int(fields, "v_head_dim"),
        "head_dim": rope + nope,
    }


def _sliding(kind: str, fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not fields.get("use_sliding_window", False):
        return {}
    if fields.get("sliding_window") is None or kind in ("llama", "deepseek_v3", "kimi_k2"):
        return {}
    types = _list(fields, "layer_types")
    if types is not None:
        unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UserError(
                f"layers of type {', '.join(unknown)} are not understood",
                where="layer_types",
                remedy="describe the model in numbers instead",
            )
        if len(types) != layers:
            raise UserError(f"{len(types)} entries for {layers} layers", where="layer_types", remedy="correct it")
        count = sum(t == "sliding_attention" for t in types)
    elif kind == "gemma3_text":
        count = layers - layers // _int(fields, "sliding_window_pattern")
    elif kind == "gpt_oss":
        count = -(-layers // 2)
    elif kind == "mistral":
        count = layers
    else:
        count = max(0, layers - _int(fields, "max_window_layers", layers, least=0))
    return {"window": _int(fields, "sliding_window"), "window_layers": count} if count else {}


def _weight_dtype(quantisation: Any) -> str:
    if quantisation is None:
        return "bf16"
    if not isinstance(quantisation, Mapping):
        raise UserError(f"{quantisation!r} is no object", where="quantization_config", remedy="correct config.json")
    method, bits = quantisation.get("quant_method"), quantisation.get("bits")
    if method == "compressed-tensors":
        bits = _compressed_tensors_bits(quantisation.get("config_groups"))
    if method in ("fp8", "fbgemm_fp8") or (method == "modelopt" and quantisation.get("quant_algo") == "FP8"):
        return "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method in ("awq", "gptq", "compressed-tensors") and bits in (4, 8):
        return "int4" if bits == 4 else "fp8"
    raise UserError(
        f"{method!r} with {bits or 'unnamed'} bits is not understood",
        where="quantization_config.quant_method",
        remedy="name the weight dtype yourself",
    )


def _compressed_tensors_bits(groups: Any) -> Any:
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            return weights.get("num_bits")
    return None
