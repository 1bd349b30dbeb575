"""What holds for every model: more work never takes less time, a union of work is no free lunch, numbers are whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel, Parallelism, find_model
from kvhearth.errors import UserError

MODELS = {
    "dense": CostModel("Llama-3.1-8B", "H100"),
    "tp4": CostModel("Llama-3.1-70B", "H100", Parallelism(tp=4)),
    "pp2": CostModel("Qwen3-32B", "L40S", Parallelism(tp=2, pp=2), weight_dtype="fp8"),
    "moe": CostModel("Qwen3-30B-A3B", "H100", kv_dtype="fp8"),
    "mla": CostModel("DeepSeek-V3", "H200", Parallelism(tp=8)),
    "windows": CostModel("gpt-oss-120b", "H100"),
    "windows, flat": CostModel("Gemma-3-27B", "A100-80", hybrid_kv_cache=False),
}
models = st.sampled_from(list(MODELS.values()))
full_models = st.sampled_from([m for m in MODELS.values() if not m.model.window])
chunks = st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 200_000)), max_size=4)
batches = st.builds(lambda n, each: (n, n * each), st.integers(0, 300), st.integers(1, 50_000))


@given(model=models, prefills=chunks, decodes=batches, more=st.integers(0, 5000))
def test_a_step_never_gets_cheaper_with_more_work(
    model: CostModel, prefills: list[tuple[int, int]], decodes: tuple[int, int], more: int
) -> None:
    n_decode, context = decodes
    base = model.step_ns(prefills, n_decode, context)
    assert type(base) is int
    assert base == model.step_ns(prefills, n_decode, context)
    assert base <= model.step_ns(prefills, n_decode, context + more)
    assert base <= model.step_ns(prefills, n_decode + more, context + more)
    assert base <= model.step_ns(prefills, n_decode + more, context)
    assert base <= model.step_ns([*prefills, (more + 1, more)], n_decode, context)
    for index, (new, cached) in enumerate(prefills):
        for larger in ((new + more, cached), (new, cached + more)):
            assert base <= model.step_ns([*prefills[:index], larger, *prefills[index + 1 :]], n_decode, context)


@given(model=models, prefills=chunks, others=chunks, decodes=batches, more=batches)
def test_a_mixed_step_costs_at_least_its_largest_part(
    model: CostModel,
    prefills: list[tuple[int, int]],
    others: list[tuple[int, int]],
    decodes: tuple[int, int],
    more: tuple[int, int],
) -> None:
    first, second = model.step_ns(prefills, *decodes), model.step_ns(others, *more)
    both = model.step_ns(prefills + others, decodes[0] + more[0], decodes[1] + more[1])
    assert both >= max(first, second)


@given(model=full_models, prefills=chunks, others=chunks, decodes=batches, more=batches)
def test_a_mixed_step_costs_at_most_the_sum_of_its_parts(
    model: CostModel,
    prefills: list[tuple[int, int]],
    others: list[tuple[int, int]],
    decodes: tuple[int, int],
    more: tuple[int, int],
) -> None:
    first, second = model.step_ns(prefills, *decodes), model.step_ns(others, *more)
    both = model.step_ns(prefills + others, decodes[0] + more[0], decodes[1] + more[1])
    overhead_once = model.gpu.step_overhead_ns if first and second else 0
    assert both <= first + second - overhead_once + 1


@given(model=models, prefills=chunks, decodes=batches)
def test_with_sliding_windows_too_prefills_and_decodes_cost_at_most_their_sum(
    model: CostModel, prefills: list[tuple[int, int]], decodes: tuple[int, int]
) -> None:
    assert model.step_ns(prefills, *decodes) <= model.step_ns(prefills, 0, 0) + model.step_ns((), *decodes)


def test_an_empty_step_takes_no_time() -> None:
    model = MODELS["dense"]
    assert model.step_ns((), 0, 0) == model.prefill_ns(0, 500) == 0


def test_weights_are_read_once_for_prefill_and_decode_together() -> None:
    model = MODELS["dense"]
    apart = model.step_ns(((64, 0),), 0, 0) + model.step_ns((), 16, 16_000)
    assert model.step_ns(((64, 0),), 16, 16_000) < 0.6 * apart


def test_a_large_decode_batch_is_bound_by_computing() -> None:
    # Without context the step is weights only: flat while they take longer to read than to use, then linear.
    steps = [MODELS["dense"].step_ns((), batch, 0) for batch in (1, 64, 2048, 4096)]
    assert steps[1] == steps[0]
    assert steps[3] - steps[2] == pytest.approx(
        2048 * 2 * MODELS["dense"].model.active_params / 0.629 / 989e3, rel=1e-3
    )


def test_a_batch_of_one_reads_only_the_experts_that_it_uses() -> None:
    model = MODELS["moe"]
    few, many = model.step_ns((), 1, 100), model.step_ns((), 256, 100)
    whole = model.model.weight_bytes("bf16") / (3.35e12 * 0.74) * 1e9
    assert few < 0.15 * whole
    assert many == pytest.approx(whole, rel=0.05)


def test_beyond_its_window_a_sliding_layer_reads_and_computes_no_more() -> None:
    model = MODELS["windows"]
    read_ns = 18 * 2 * 8 * 64 * 2 / (3.35e12 * 0.74) * 1e9
    assert model.step_ns((), 1, 200_000) - model.step_ns((), 1, 100_000) == pytest.approx(100_000 * read_ns, rel=1e-4)
    pair_ns = 18 * 4 * 64 * 64 / (989e12 * 0.578) * 1e9
    later = model.prefill_ns(8192, 200_000) - model.prefill_ns(8192, 100_000)
    assert later == pytest.approx(8192 * 100_000 * pair_ns, rel=1e-4)


def test_fp8_weights_halve_prefill_only_where_the_gpu_computes_in_fp8() -> None:
    def ratio(gpu: str) -> float:
        whole, half = (CostModel("Llama-3.1-8B", gpu, weight_dtype=dtype) for dtype in ("bf16", "fp8"))
        return half.prefill_ns(2048) / whole.prefill_ns(2048)

    assert ratio("H100") == pytest.approx(0.5, abs=0.04)
    assert ratio("A100-80") == pytest.approx(1.0)
    assert CostModel("Llama-3.1-8B", "A100-80", weight_dtype="fp8").step_ns((), 1, 100) < 0.6 * CostModel(
        "Llama-3.1-8B", "A100-80"
    ).step_ns((), 1, 100)


def test_ranks_pay_for_talking_and_stages_save_memory_but_no_time() -> None:
    def prefill(tp: int, pp: int = 1, gpu: str = "H100") -> int:
        return CostModel("Qwen2.5-32B", gpu, Parallelism(tp=tp, pp=pp)).prefill_ns(4096)

    assert prefill(1) / 4 < prefill(4) < prefill(1) / 2
    assert prefill(4) < prefill(4, pp=2) < 1.05 * prefill(4)
    # Without a link between GPUs the all-reduces go over PCIe, and a second GPU gains less.
    assert prefill(2, gpu="L40S") / prefill(1, gpu="L40S") > 1.1 * prefill(2) / prefill(1)


@given(model=models, new=st.integers(1, 50_000), rest=st.integers(1, 50_000), cached=st.integers(0, 100_000))
def test_splitting_a_prefill_keeps_its_flops_and_saves_no_time(
    model: CostModel, new: int, rest: int, cached: int
) -> None:
    whole = model.prefill_flops(new + rest, cached)
    assert type(whole) is int
    assert whole == model.prefill_flops(new, cached) + model.prefill_flops(rest, cached + new)
    parts = model.prefill_ns(new, cached) + model.prefill_ns(rest, cached + new)
    assert parts >= model.prefill_ns(new + rest, cached)


def test_prefill_flops_are_the_formula() -> None:
    n, p = 1000, 500
    model = find_model("Llama-3.1-8B")
    linear = 2 * (model.params - 2 * model.head_params - 65 * 4096) * n
    assert MODELS["dense"].prefill_flops(n, p) == linear + 4 * 32 * 32 * 128 * n * (p + n // 2)


def test_a_sliding_window_bounds_attention_but_not_with_the_cache_flat() -> None:
    hybrid = CostModel("Gemma-3-27B", "H100")
    flat = CostModel("Gemma-3-27B", "H100", hybrid_kv_cache=False)
    assert hybrid.prefill_flops(1000, 50_000) == flat.prefill_flops(1000, 50_000)
    assert hybrid.kv_bytes(50_000) < flat.kv_bytes(50_000) / 5


@given(model=models, tokens=st.integers(0, 200_000), more=st.integers(0, 200_000))
def test_kv_bytes_grow_with_tokens_and_no_rank_holds_more_than_all(model: CostModel, tokens: int, more: int) -> None:
    nbytes = model.kv_bytes(tokens)
    assert type(nbytes) is int
    assert nbytes <= model.kv_bytes(tokens + more)
    assert model.kv_bytes_per_rank(tokens) <= nbytes <= model.kv_bytes_per_rank(tokens) * model.parallelism.ranks


def test_ranks_share_kv_heads_until_there_are_none_left() -> None:
    def per_rank(name: str, tp: int, pp: int = 1) -> int:
        return CostModel(name, "H100", Parallelism(tp=tp, pp=pp)).kv_bytes_per_rank(1)

    assert [per_rank("Llama-3.1-70B", tp) for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]
    assert per_rank("Llama-3.1-70B", 2, pp=4) == 40_960
    assert per_rank("DeepSeek-V3", 8) == 70_272
    assert per_rank("DeepSeek-V3", 8, pp=2) == 31 * 1152


def test_fp8_kv_halves_bytes_and_transfer() -> None:
    whole, half = CostModel("Llama-3.1-8B", "H100"), CostModel("Llama-3.1-8B", "H100", kv_dtype="fp8")
    assert 2 * half.kv_bytes(1000) == whole.kv_bytes(1000)
    assert 2 * half.copy_op_bytes == whole.copy_op_bytes
    assert half.break_even_bandwidth(2048) == pytest.approx(whole.break_even_bandwidth(2048) / 2, rel=0.01)


def test_ranks_load_their_shares_in_parallel_and_mla_loads_a_copy_each() -> None:
    nbytes = 1 << 30
    one, four = (CostModel("Llama-3.1-70B", "H100", Parallelism(tp=t), vllm_version="0.12") for t in (1, 4))
    assert four.transfer_ns(nbytes // 4, "pcie", four.copy_op_bytes) == four.dram_load_ns(nbytes)
    assert one.dram_load_ns(nbytes) > 3 * four.dram_load_ns(nbytes)
    mla = [
        CostModel("DeepSeek-V3", "H200", Parallelism(tp=t), vllm_version="0.12").dram_load_ns(nbytes) for t in (1, 8)
    ]
    assert mla[0] == mla[1]


def test_from_0_29_on_pages_are_loaded_no_slower_than_by_a_kernel_and_saved_by_copies() -> None:
    nbytes = 1 << 30
    for tp, name, op_bytes in ((4, "Llama-3.1-70B", 16 << 10), (1, "Llama-3.1-8B", 64 << 10)):
        model = CostModel(name, "H100", Parallelism(tp=tp))
        assert model.copy_op_bytes == op_bytes
        assert nbytes / tp / model.dram_load_ns(nbytes) == pytest.approx(51 * 68.5 / 83.4)
        assert model.dram_save_ns(nbytes) > 3 * model.dram_load_ns(nbytes)
        old = CostModel(name, "H100", Parallelism(tp=tp), vllm_version="0.11")
        assert old.dram_load_ns(nbytes) == old.dram_save_ns(nbytes)
    large = CostModel("Llama-3.1-8B", "H100", block_size=1024)
    assert large.dram_load_ns(nbytes) == large.dram_save_ns(nbytes)


def test_restoring_pays_exactly_above_the_break_even_bandwidth() -> None:
    model = MODELS["tp4"]
    for tokens, cached in ((512, 0), (8192, 0), (8192, 30_000)):
        bandwidth = model.break_even_bandwidth(tokens, cached)
        assert model.kv_bytes(tokens) / bandwidth * 1e9 == pytest.approx(model.prefill_ns(tokens, cached))
    assert model.break_even_bandwidth(8192, 30_000) < model.break_even_bandwidth(8192)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_dtype": "int3"}, "kv_dtype"),
        ({"weight_dtype": "fp17"}, "weight_dtype"),
        ({"block_size": 0}, "block_size"),
        ({"vllm_version": "new"}, "vllm_version"),
    ],
)
def test_a_bad_setting_is_named(change: dict[str, object], field: str) -> None:
    with pytest.raises(UserError) as error:
        CostModel("Llama-3.1-8B", "H100", **change)  # type: ignore[arg-type]
    assert error.value.where == field
    with pytest.raises(UserError, match="tokens"):
        MODELS["dense"].break_even_bandwidth(0)
