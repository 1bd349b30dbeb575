"""A model can be given by its config.json: the same numbers as the catalog, and clear words about what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhearth.cost import Model, find_model
from kvhearth.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN2 = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28,
}  # fmt: skip
QWEN2_SMALL = QWEN2 | {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_hidden_layers": 24,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "max_window_layers": 21,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "attention_bias": False,
    "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"},
}  # fmt: skip
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "n_routed_experts": 384, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 128,
    "num_experts_per_tok": 4, "attention_bias": True, "sliding_window": 128, "tie_word_embeddings": False,
    "layer_types": ["sliding_attention", "full_attention"] * 18, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}  # fmt: skip

CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("Llama-3.1-8B", LLAMA),
    ("Mistral-7B", MISTRAL),
    ("Qwen2.5-7B", QWEN2),
    ("Qwen2.5-0.5B", QWEN2_SMALL),
    ("Qwen3-32B", QWEN3),
    ("Qwen3-30B-A3B", QWEN3_MOE),
    ("DeepSeek-V3", DEEPSEEK),
    ("Kimi-K2", KIMI),
    ("gpt-oss-120b", GPT_OSS),
    ("Gemma-3-27B", GEMMA3),
]


@pytest.mark.parametrize(("name", "config"), CONFIGS, ids=[name for name, _ in CONFIGS])
def test_a_config_file_gives_the_catalogs_model(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Model.from_hf_config(tmp_path, name=name) == find_model(name)
    assert Model.from_hf_config(tmp_path / "config.json", name=name) == find_model(name)
    assert Model.from_hf_config(config, name=name) == find_model(name)


def test_without_a_name_the_folder_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-finetune"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert Model.from_hf_config(folder).name == "my-finetune"


def test_a_sliding_window_is_read_from_each_architectures_own_fields() -> None:
    def windows(config: dict[str, Any]) -> tuple[int, int]:
        model = Model.from_hf_config(config)
        return model.window, model.window_layers

    without_types = {field: value for field, value in GPT_OSS.items() if field != "layer_types"}
    assert windows(without_types) == (128, 18)
    assert windows(MISTRAL | {"sliding_window": 4096}) == (4096, 32)
    assert windows(QWEN2 | {"use_sliding_window": True, "max_window_layers": 20}) == (131072, 8)
    pattern = GEMMA3["text_config"] | {"sliding_window_pattern": 2}  # type: ignore[operator]
    assert windows(pattern) == (1024, 31)


@pytest.mark.parametrize(
    ("quantisation", "dtype"),
    [
        (None, "bf16"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "fp8"),
    ],
)
def test_the_weight_dtype_follows_the_quantisation(quantisation: dict[str, Any] | None, dtype: str) -> None:
    assert Model.from_hf_config(LLAMA | {"quantization_config": quantisation}).weight_dtype == dtype


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (LLAMA | {"model_type": "mamba"}, "model_type"),
        ({field: value for field, value in LLAMA.items() if field != "hidden_size"}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": "32"}, "num_hidden_layers"),
        (LLAMA | {"vocab_size": -1}, "vocab_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE | {"num_experts_per_tok": 200}, "num_experts_per_tok"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank"),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 36}, "layer_types"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS | {"layer_types": "full_attention"}, "layer_types"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (LLAMA | {"quantization_config": {"quant_method": "aqlm"}}, "quantization_config.quant_method"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config.quant_method"),
        (
            LLAMA | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": []}},
            "quantization_config.quant_method",
        ),
        (LLAMA | {"quantization_config": "fp8"}, "quantization_config"),
    ],
)
def test_what_is_not_understood_is_named(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as error:
        Model.from_hf_config(config)
    assert error.value.where == field
    assert error.value.remedy


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe\x00"])
def test_an_unreadable_file_is_named(content: str | bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"config\.json"):
        Model.from_hf_config(file)
