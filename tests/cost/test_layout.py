"""How blocks are cut into copies by vLLM version, and which splits over ranks are refused."""

from __future__ import annotations

import pytest

from kvhearth.cost import CostModel, Parallelism
from kvhearth.cost.layout import parse_vllm_version
from kvhearth.errors import UserError

KIB, MIB = 1024, 1024 * 1024

# Bytes of one contiguous piece of a 16-token block: before 0.12, 0.12 to 0.28 (vLLM blog 2026-01-08), from 0.29.
LAYOUTS = [
    ("Llama-3.1-8B", 1, 32 * KIB, 2 * MIB, 64 * KIB),
    ("Llama-3.2-1B", 1, 16 * KIB, MIB // 2, 32 * KIB),
    ("Llama-3.1-70B", 4, 8 * KIB, 5 * MIB // 4, 16 * KIB),
    ("Qwen3-32B", 2, 16 * KIB, 2 * MIB, 32 * KIB),
]


@pytest.mark.parametrize(("model", "tp", "before", "cross_layer", "layer_page"), LAYOUTS)
def test_the_vllm_version_sets_the_copy_size(
    model: str, tp: int, before: int, cross_layer: int, layer_page: int
) -> None:
    def op_bytes(version: str) -> int:
        return CostModel(model, "H100", Parallelism(tp=tp), vllm_version=version).copy_op_bytes

    assert op_bytes("0.11.2") == before
    assert op_bytes("0.12") == op_bytes("0.28.1") == cross_layer
    assert op_bytes("0.29.0") == op_bytes("0.32.0+cpu") == layer_page


def test_mla_copies_one_latent_tensor() -> None:
    assert CostModel("DeepSeek-V3", "H200", Parallelism(tp=8), vllm_version="0.11").copy_op_bytes == 16 * 576 * 2


@pytest.mark.parametrize("version", ["", "latest", "1", "0.x"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(UserError, match="vllm_version"):
        parse_vllm_version(version)


@pytest.mark.parametrize(
    ("model", "tp", "pp", "field"),
    [
        ("Llama-3.1-8B", 0, 1, "parallelism.tp"),
        ("Llama-3.1-8B", 1, -1, "parallelism.pp"),
        ("Llama-3.1-8B", 3, 1, "parallelism.tp"),
        ("Qwen2.5-7B", 8, 1, "parallelism.tp"),
        ("Qwen2.5-0.5B", 7, 1, "parallelism.tp"),
        ("Llama-3.2-1B", 1, 17, "parallelism.pp"),
    ],
)
def test_an_impossible_split_is_refused(model: str, tp: int, pp: int, field: str) -> None:
    with pytest.raises(UserError) as error:
        CostModel(model, "H100", Parallelism(tp=tp, pp=pp))
    assert error.value.where == field
