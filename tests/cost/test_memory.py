"""How much KV fits into HBM, and what is said when nothing does."""

from __future__ import annotations

import pytest

from kvhearth.cost import CostModel, Parallelism
from kvhearth.errors import UserError


def test_a_model_larger_than_the_gpu_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError) as error:
        CostModel("Llama-3.1-70B", "H100").hbm_kv_tokens()
    message = str(error.value)
    for part in ("Llama-3.1-70B does not fit", "141.1 GB of bf16 weights", "tp 1", "78.1 GB usable on H100", "0.92"):
        assert part in message
    assert "more GPUs" in error.value.remedy


@pytest.mark.parametrize("utilisation", [0, -0.5, 1.01])
def test_a_share_of_memory_that_is_none_is_refused(utilisation: float) -> None:
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        CostModel("Llama-3.1-8B", "H100").hbm_kv_tokens(utilisation)


def test_what_is_usable_is_divided_and_nothing_is_lost() -> None:
    budget = CostModel("Llama-3.1-8B", "H100").memory_budget(0.9)
    assert budget.usable == budget.weights + budget.reserve + budget.kv_bytes
    assert budget.weights == 8_030_261_248 * 2


def test_room_for_kv_grows_with_memory_ranks_and_smaller_numbers() -> None:
    def tokens(**settings: object) -> int:
        return CostModel("Qwen3-32B", "H100", **settings).hbm_kv_tokens(0.9)  # type: ignore[arg-type]

    base = tokens()
    assert base < tokens(weight_dtype="fp8") < tokens(weight_dtype="int4")
    assert tokens(kv_dtype="fp8") == pytest.approx(2 * base, abs=2)
    assert tokens(parallelism=Parallelism(tp=2)) > 4 * base
    assert tokens(parallelism=Parallelism(pp=2)) > 4 * base
    model = CostModel("Qwen3-32B", "H100")
    assert model.hbm_kv_tokens(0.95) > base > model.hbm_kv_tokens(0.9, max_num_batched_tokens=16_384)
    assert base > model.hbm_kv_tokens(0.9, max_num_seqs=1024)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "Gemma-3-27B", "Llama-3.1-8B"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_the_longest_sequence_fits_and_one_token_more_does_not(name: str, hybrid: bool) -> None:
    model = CostModel(name, "H100", hybrid_kv_cache=hybrid)
    tokens, room = model.hbm_kv_tokens(), model.memory_budget().kv_bytes
    assert model.kv_bytes_per_rank(tokens) <= room < model.kv_bytes_per_rank(tokens + 1)
    assert model.hbm_kv_blocks() == tokens // 16


def test_a_short_sequence_that_fits_inside_its_window() -> None:
    model = CostModel("Gemma-3-27B", "H100", Parallelism(tp=1))
    share = (model.memory_budget(1.0).weights + model.memory_budget(1.0).reserve + 100 * MB) / model.gpu.device_bytes
    tokens = model.hbm_kv_tokens(share)
    assert 0 < tokens < 1024
    assert tokens == pytest.approx(100 * MB / 507_904, abs=1)


MB = 1_000_000
