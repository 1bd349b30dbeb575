"""The numbers of an engine add up, and grouping equal gaps changes none of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.emulator.exposition import RequestMetrics
from kvhearth.metrics import Registry, all_metrics, parse_exposition, vllm

NAME = "vllm:inter_token_latency_seconds"


@given(st.dictionaries(st.sampled_from([0, 1, 10_000_000, 10_000_001, 3 * 10**9, 10**12]), st.integers(1, 50)))
def test_gaps_grouped_are_gaps_observed_one_by_one(gaps: dict[int, int]) -> None:
    grouped, single = Registry(), Registry()
    RequestMetrics(grouped, "m", "0").gaps(gaps)
    one_by_one = single.histogram(vllm.INTER_TOKEN_LATENCY).labels("m", "0")
    for gap_ns, times in gaps.items():
        for _ in range(times):
            one_by_one.observe(gap_ns / 1e9)
    ours, theirs = (parse_exposition(registry.expose().decode()) for registry in (grouped, single))
    assert ours[f"{NAME}_bucket"] == theirs[f"{NAME}_bucket"]
    assert ours[f"{NAME}_count"] == theirs[f"{NAME}_count"]
    difference = sum(ours[f"{NAME}_sum"].values()) - sum(theirs[f"{NAME}_sum"].values())
    assert abs(difference) < 1e-6


def test_times_are_said_to_be_emulated(engine) -> None:
    text = engine.http.get("/metrics").text
    for line in text.splitlines():
        if line.startswith("# HELP vllm:") and line.split()[2].endswith("_seconds"):
            assert "emulated seconds" in line


def test_every_metric_that_is_defined_for_the_emulator_is_shown(start, tmp_path) -> None:
    from kvhearth.engine import OffloadMode

    engine = start(offload_mode=OffloadMode.SHARED, store=f"unix:{tmp_path}/none", store_deadline_seconds=0.2)
    engine.complete("word " * 100)
    shown = set(parse_exposition(engine.http.get("/metrics").text))
    defined = [metric for metric in all_metrics() if metric.name.startswith(("vllm:", "kvhearth_emulator_"))]
    assert len(defined) > 40
    for metric in defined:
        assert {metric.exposed_name, f"{metric.name}_count"} & shown, metric.name
