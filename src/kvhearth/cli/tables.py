"""The table that the demo and the simulator print: modes side by side, prediction beside measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.table import Table

from kvhearth.cli import console
from kvhearth.cost.verdict import gain
from kvhearth.planner.outcome import SOURCES, Outcome
from kvhearth.planner.report import Comparison

_NUMBERS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("throughput, tokens/s", lambda o: f"{o.throughput_tokens_per_second:,.0f}"),
    ("goodput, requests/s", lambda o: f"{o.goodput_requests_per_second:.2f}"),
    ("TTFT p50, s", lambda o: f"{o.ttft_p50_seconds:.2f}"),
    ("TTFT p99, s", lambda o: f"{o.ttft_p99_seconds:.2f}"),
    ("preemptions", lambda o: _count(o.preemptions)),
    ("tokens re-prefilled", lambda o: _count(o.reprefill_tokens)),
    ("re-prefills avoided", lambda o: _count(o.reprefills_avoided)),
    ("  and their tokens", lambda o: _count(o.reprefill_avoided_tokens)),
)


def comparison_table(comparison: Comparison) -> Table:
    """One column a mode; where both sides are there, the prediction follows each measured figure, dimmed."""
    modes = list(comparison.shown)
    table = console.table("", *modes, right=modes, title=_title(comparison))
    requests = [comparison.shown[mode] for mode in modes]
    table.add_row("requests (errors)", *(f"{_count(o.requests)} ({o.errors})" for o in requests))
    for name, show in _NUMBERS:
        table.add_row(name, *(_beside(comparison, mode, show) for mode in modes))
    for source in SOURCES:
        table.add_row(f"prompt from {source}", *(_beside(comparison, mode, _share(source)) for mode in modes))
    table.add_row("gain over none", *(_beside(comparison, mode, _gain_over(comparison, mode)) for mode in modes))
    if comparison.curve:
        points = comparison.curve.break_even
        table.add_row("pays from HBM use of", *(_point(points, mode) for mode in modes))
    return table


def _count(number: int) -> str:
    """Three or four figures: 780, 7,926, 63.2k, 1.66M."""
    for limit, divisor, suffix in ((10_000, 1, ""), (1_000_000, 1_000, "k")):
        if number < limit:
            return f"{number:,}" if divisor == 1 else f"{number / divisor:.1f}{suffix}"
    return f"{number / 1_000_000:.2f}M"


def _title(comparison: Comparison) -> str:
    sides = "measured" if comparison.measured else "simulated"
    return f"{comparison.workload['name']}: {sides}" + (" (predicted)" if comparison.measured else "")


def _beside(comparison: Comparison, mode: str, show: Callable[[Outcome], str]) -> str:
    predicted = show(comparison.predicted[mode])
    return f"{show(comparison.measured[mode])} [dim]({predicted})[/]" if comparison.measured else predicted


def _share(source: str) -> Callable[[Outcome], str]:
    def show(outcome: Outcome) -> str:
        total = sum(outcome.prompt_tokens_by_source.values())
        return f"{outcome.prompt_tokens_by_source[source] / total:.1%}" if total else "–"

    return show


def _gain_over(comparison: Comparison, mode: str) -> Callable[[Outcome], str]:
    baselines = {id(side[mode]): side["none"] for side in (comparison.measured, comparison.predicted) if side}

    def show(outcome: Outcome) -> str:
        baseline = baselines[id(outcome)].throughput_tokens_per_second
        return f"{gain(outcome.throughput_tokens_per_second, baseline):+.1%}"

    return show


def _point(points: Mapping[str, float | None], mode: str) -> str:
    if mode not in points:
        return "–"
    point = points[mode]
    return "not reached" if point is None else f"{point:.0%}"
