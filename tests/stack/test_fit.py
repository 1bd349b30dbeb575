"""A Stack against the catalog: unknown names and what does not fit are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.stack import Stack, check_catalog

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def stack(**pool: Any) -> Stack:
    return Stack.model_validate({"pools": [{"model": "Llama-3.1-8B", **pool}], "store": {"size": "64MiB"}})


@pytest.mark.parametrize(
    ("pool", "line"),
    [
        ({"model": "Llama-3.1-7B"}, r"f: pools\[0\]\.model: unknown model 'Llama-3.1-7B'; did you mean .*Llama-3.1-8B"),
        ({"gpu": "H1000"}, r"f: pools\[0\]\.gpu: unknown gpu 'H1000'; did you mean H100"),
        ({"model": "Llama-3.1-70B"}, r"f: pools\[0\]\.gpu: Llama-3.1-70B does not fit: .*; use more GPUs"),
        ({"tensor_parallel_size": 64}, r"f: pools\[0\]\.tensor_parallel_size: .* 64 ranks"),
        ({"max_model_len": 10**6}, r"f: pools\[0\]\.max_model_len: 1000000 tokens, but HBM holds .*; set at most \d+"),
        (
            {"num_gpu_blocks_override": 10**6},
            r"f: pools\[0\]\.num_gpu_blocks_override: 1000000 blocks, .*; set at most",
        ),
        (
            {"offload": {"mode": "native", "dram_size": "1MiB"}},
            r"f: pools\[0\]\.offload\.dram_size: 1 MiB is less than one chunk \(2 MiB\)",
        ),
        (
            {"offload": {"mode": "shared", "blocks_per_chunk": 64}, "emulator": {"store_bytes_scale": 1}},
            r"f: store\.size: 64 MiB is too little for chunks of 128 MiB as stored",
        ),
        (
            {"offload": {"mode": "shared"}, "emulator": {"store_link": "string"}},
            r"f: pools\[0\]\.emulator\.store_link: unknown link 'string'",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(pool: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        check_catalog(stack(**pool), where="f")


def test_what_fits_is_let_through() -> None:
    check_catalog(stack(replicas=4, num_gpu_blocks_override=2048, offload={"mode": "shared", "blocks_per_chunk": 16}))
    check_catalog(stack(model="Llama-3.1-70B", tensor_parallel_size=4))


def test_a_config_json_serves_as_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    check_catalog(stack(model=str(path)))
    with pytest.raises(UserError, match=rf"^f: pools\[0\]\.model: {tmp_path}/none\.json: "):
        check_catalog(stack(model=str(tmp_path / "none.json")), where="f")
