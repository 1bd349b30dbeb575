"""The demo's measurement keeps up or says so, agrees with the prediction, and rests its verdict on what it measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvhearth.control.demo import MODES, Scenario, compare, first_time_scale, lag_limit_seconds, measure_modes
from kvhearth.control.measure import Measured, Watch, measure
from kvhearth.errors import UserError
from kvhearth.planner.cluster import Simulated, simulate
from kvhearth.planner.deployment import cluster_of
from kvhearth.planner.generate import RECIPES, generate
from kvhearth.planner.workload import Segment, Turn, User, Workload

SMALL = replace(Scenario(), hbm_blocks=512, dram_bytes=2 << 30, store_kv_bytes=64 << 30)


def small_workload() -> Workload:
    recipe = replace(RECIPES["multi-tenant"][1], users=40, turns=2, tenants=4, ramp_seconds=4.0)
    return generate("multi-tenant", recipe=recipe)


def predictions(workload: Workload) -> dict[str, Simulated]:
    return {mode: simulate(workload, cluster_of(SMALL.stack(mode))) for mode in MODES}


@pytest.mark.timeout(180)
def test_measurement_and_prediction_agree_through_the_real_router_and_store() -> None:
    workload = small_workload()
    predicted = predictions(workload)
    measured = measure_modes(workload, SMALL, predicted, target_seconds=8.0)
    comparison = compare(workload, SMALL.describe(), measured, predicted, None)
    total = sum(s.prompt_tokens for s in measured["none"].served)
    for mode in MODES:
        real, foretold = comparison.measured[mode], comparison.predicted[mode]
        assert real.errors == 0
        assert real.throughput_tokens_per_second == pytest.approx(foretold.throughput_tokens_per_second, rel=0.2)
        assert sum(real.prompt_tokens_by_source.values()) == total
        for source, tokens in real.prompt_tokens_by_source.items():
            assert tokens == pytest.approx(foretold.prompt_tokens_by_source[source], abs=0.1 * total)
        assert measured[mode].lag_seconds <= lag_limit_seconds(predicted[mode])
    assert comparison.measured["shared"].prompt_tokens_by_source["store"] > 0
    assert comparison.measured["native"].reprefills_avoided > 0


def test_a_machine_that_cannot_keep_up_is_told_so_and_slower_clocks_are_tried() -> None:
    workload = Workload("w", (User("u", "t", 0, (Turn((Segment(1, 200),), 20),)),))
    tried: list[float] = []
    with pytest.raises(UserError, match=r"this machine lags .* at scale 0\.\d+; free the machine"):
        measure(
            lambda scale: SMALL.stack("none", scale),
            workload,
            time_scale=1.0,
            lag_limit_seconds=1e-9,
            watch=Watch(on_restart=lambda scale, lag: tried.append(scale)),
        )
    assert tried == [0.25]


def test_hbm_grows_to_hold_the_longest_request() -> None:
    long = Workload("w", (User("u", "t", 0, (Turn((Segment(1, 60_000),), 10),)),))
    assert SMALL.for_workload(small_workload()) == SMALL
    grown = SMALL.for_workload(long)
    assert grown.hbm_blocks * 16 >= 60_010
    assert grown.stack("none").pools[0].num_gpu_blocks_override == grown.hbm_blocks + 1


def test_first_time_scale_is_held_back_by_the_cores() -> None:
    workload = small_workload()
    predicted = predictions(workload)
    longest = max(run.outcome.makespan_seconds for run in predicted.values())
    patient, hasty = (first_time_scale(workload, predicted, seconds) for seconds in (1000.0, 1e-6))
    assert patient == pytest.approx(longest / 1000)
    assert patient < hasty < longest / 1e-6


def test_verdict_rests_on_what_was_measured() -> None:
    workload = small_workload()
    run = simulate(workload, cluster_of(SMALL.stack("none")))
    rising = {
        mode: run._replace(outcome=replace(run.outcome, throughput_tokens_per_second=100.0 * (1 + i)))
        for i, mode in enumerate(MODES)
    }
    flat = {mode: Measured(run.outcome, [], 1.0, 0.0) for mode in MODES}
    assert compare(workload, {}, flat, rising, None).verdict.mode == "none"
    assert compare(workload, {}, {}, rising, None).verdict.mode == "shared"
