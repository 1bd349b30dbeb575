"""Figures are folded the same way for simulated and measured runs."""

import pytest

from kvhearth.engine.ports import Counters
from kvhearth.planner.outcome import Served, counters_from, summarise, total_counters, within
from kvhearth.planner.workload import Slo

S = 1_000_000_000


def served(due: float, first: float, end: float, prompt: int = 100, out: int = 11, error: str | None = None) -> Served:
    return Served("u", 0, int(due * S), int(first * S), int(end * S), prompt, out, "engine-0", error)


def test_rates_leave_out_the_last_of_the_requests_served() -> None:
    steady = [served(0, 1, 10 + i / 100) for i in range(95)]
    stragglers = [served(0, 1, 100 + i) for i in range(5)]
    outcome = summarise([*stragglers, *steady], [], Slo(ttft_seconds=1, tpot_seconds=99))
    assert outcome.throughput_tokens_per_second == pytest.approx(95 * 111 / 10.94)
    assert outcome.goodput_requests_per_second == pytest.approx(95 / 10.94)
    assert outcome.makespan_seconds == 104


def test_throughput_is_whole_requests_over_the_time_from_first_due_to_last_end() -> None:
    outcome = summarise([served(1, 2, 3), served(2, 3, 6), served(2, 2, 9, error="cut")], [], Slo())
    assert outcome.requests == 3
    assert outcome.errors == 1
    assert outcome.makespan_seconds == pytest.approx(5)
    assert outcome.throughput_tokens_per_second == pytest.approx(2 * 111 / 5)
    assert outcome.ttft_p50_seconds == pytest.approx(1)


def test_goodput_counts_requests_inside_both_limits() -> None:
    slo = Slo(ttft_seconds=1, tpot_seconds=0.1)
    assert within(served(0, 1, 2), slo)
    assert not within(served(0, 1.01, 2), slo)
    assert not within(served(0, 1, 2.02), slo)
    assert within(served(0, 1, 1, out=1), slo)
    assert summarise([served(0, 1, 2), served(0, 1.5, 2)], [], slo).goodput_requests_per_second == pytest.approx(0.5)


def test_counters_add_up_over_engines() -> None:
    counts = [Counters(preemptions=2, prompt_tokens_hbm=5), Counters(preemptions=1, prompt_tokens_store=7)]
    assert total_counters(counts).preemptions == 3
    outcome = summarise([served(0, 1, 2)], counts, Slo())
    assert outcome.prompt_tokens_by_source == {"hbm": 5, "dram": 0, "store": 7, "compute": 0}


def test_counters_are_read_from_a_state_page() -> None:
    assert counters_from({"preemptions": 4, "something_new": 1}) == Counters(preemptions=4)


def test_nothing_served_is_zero_not_a_crash() -> None:
    assert summarise([], [], Slo()).throughput_tokens_per_second == 0.0
