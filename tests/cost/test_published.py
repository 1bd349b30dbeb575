"""The cost model against what was published: each row states its figure, its tolerance and why that much."""

from __future__ import annotations

import pytest

from kvhearth.cost import CostModel, Parallelism, find_gpu, find_model
from kvhearth.cost.published import DECODE_CONTEXT, Row, rows

MIB = 1024 * 1024

# KV bytes a token in BF16, and bytes of full sliding windows: arithmetic, hence exact.
KV = [
    ("Llama-3.1-8B", 131_072, 0),
    ("Mistral-7B", 131_072, 0),
    ("Llama-3.1-70B", 327_680, 0),
    ("Llama-3.3-70B", 327_680, 0),
    ("Qwen2.5-7B", 57_344, 0),
    ("Qwen2.5-32B", 262_144, 0),
    ("Qwen3-32B", 262_144, 0),
    ("Qwen3-8B", 147_456, 0),
    ("Qwen3-30B-A3B", 98_304, 0),
    ("DeepSeek-V3", 70_272, 0),
    ("Kimi-K2", 70_272, 0),
    ("gpt-oss-120b", 36_864, 4_718_592),
    ("gpt-oss-20b", 24_576, 3_145_728),
    ("Gemma-3-27B", 81_920, 416 * MIB),
]


@pytest.mark.parametrize(("name", "per_token", "windows"), KV)
def test_kv_bytes_per_token(name: str, per_token: int, windows: int) -> None:
    model = CostModel(name, "B200")
    assert model.kv_bytes_per_token == per_token
    assert model.kv_bytes(50_000) == 50_000 * per_token + windows


def test_gemma_without_the_hybrid_manager_grows_in_all_layers() -> None:
    model = CostModel("Gemma-3-27B", "H100", hybrid_kv_cache=False)
    assert model.kv_bytes_per_token == 507_904
    assert model.kv_bytes(50_000) == 50_000 * 507_904


def test_4k_tokens_of_a_70b_with_fp8_kv_are_671_mb() -> None:
    # A course text says 500 MB; 80 layers * 2 * 8 heads * 128 * 1 B * 4,096 tokens is 671 MB.
    assert CostModel("Llama-3.1-70B", "H100", Parallelism(tp=4), kv_dtype="fp8").kv_bytes(4096) == 671_088_640


# How far each figure may be off, and why, stands in its row of `published`. This pins what the rows must contain, so
# that none can quietly go.
PUBLISHED = {
    ("batch 1", 6.2), ("batch 64", 10.5), ("10000 tokens", 265), ("20000 tokens", 640), ("50000 tokens", 2290),
    ("100000 tokens", 6850), ("131072 tokens", 0.49), ("10000 tokens", 40), ("20000 tokens", 70), ("50000 tokens", 160),
    ("100000 tokens", 310), ("Llama-3.1-8B TP1", 5.6), ("Llama-3.1-70B TP4", 5.2), ("Llama-3.1-70B TP8", 9.5),
    ("8 x A800", 6), ("8 x H800", 19), ("32 KiB", 7.5), ("128 KiB", 23), ("512 KiB", 39.5), ("1024 KiB", 44),
    ("2048 KiB", 48), ("16384 KiB", 51), ("nvme-read", 6.5), ("nvme-write", 5.0), ("cloud-block-read", 0.762),
    ("ceph-rgw-read", 0.26), ("ceph-rgw-write", 0.175), ("HBM", 9271), ("HBM", 18_144),
}  # fmt: skip


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.what} = {row.published:g} {row.unit}")
def test_a_published_figure_is_met_within_its_rows_tolerance(row: Row) -> None:
    assert row.why
    assert row.predict() == pytest.approx(row.published, rel=row.tolerance)


def test_no_published_figure_is_left_out_and_fits_are_tight() -> None:
    assert {(row.what, row.published) for row in rows()} == PUBLISHED
    assert all(row.tolerance <= 0.025 for row in rows() if row.fitted)


def test_decode_reaches_0_72_of_the_memory_bandwidth_overhead_included() -> None:
    model, gpu = find_model("Llama-3.1-8B"), find_gpu("H100")
    read = (model.params - model.head_params) * 2 + DECODE_CONTEXT * 131_072
    took = CostModel(model, gpu).step_ns((), 1, DECODE_CONTEXT)
    assert read / (took / 1e9) / gpu.hbm_bandwidth == pytest.approx(0.72, abs=0.005)


@pytest.mark.parametrize(("tokens", "mfu"), [(10_000, 0.63), (20_000, 0.61), (50_000, 0.60), (100_000, 0.59)])
def test_prefill_reaches_the_share_of_peak_that_the_measurement_implies(tokens: int, mfu: float) -> None:
    # From the same vLLM blog; 2.5 % as for the times.
    model = CostModel("Llama-3.1-8B", "H100")
    reached = model.prefill_flops(tokens) / (model.prefill_ns(tokens) / 1e9) / 989e12
    assert reached == pytest.approx(mfu, rel=0.025)


def test_a_restore_is_predicted_short_only_by_what_the_model_leaves_out() -> None:
    restores = [row for row in rows() if "restore" in row.group]
    assert len(restores) == 4
    missing = [row.published - row.predict() for row in restores]
    assert all(3 < milliseconds < 30 for milliseconds in missing)
    assert missing == sorted(missing)


def test_the_llm_d_guides_kv_bytes_are_by_arithmetic() -> None:
    # The guide says 2.62 MB a block and 24.3 GB an engine; the shapes give 4.19 MB and 38.9 GB.
    model = CostModel("Qwen3-32B", "H100", Parallelism(tp=2))
    assert model.kv_bytes(16) == 4_194_304
    assert 9271 * model.kv_bytes(16) / 1e9 == pytest.approx(38.9, abs=0.1)
