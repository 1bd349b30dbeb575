"""Writes a comparison of modes down: JSON for programs, CSV for spreadsheets, a picture for people."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.cost.verdict import Verdict
from kvhearth.planner.breakeven import Curve
from kvhearth.planner.outcome import SOURCES, Outcome

COLOURS = {"none": "#8c8c8c", "native": "#e69f00", "shared": "#0072b2"}
SOURCE_COLOURS = {"hbm": "#009e73", "dram": "#e69f00", "store": "#0072b2", "compute": "#c44e52"}
"""Okabe–Ito's palette, which people with colour blindness can tell apart."""


LEAST_GAIN_SHOWN = 5.0
"""Percent that the break-even axis spans at least, so that noise does not look like a cliff."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload in several modes: what was measured, what was predicted, and what follows.

    ``workload`` and ``setup`` are described in plain values; ``measured`` is empty after a simulation alone.
    """

    workload: dict[str, Any]
    setup: dict[str, Any]
    measured: dict[str, Outcome]
    predicted: dict[str, Outcome]
    verdict: Verdict
    curve: Curve | None = None

    @property
    def shown(self) -> Mapping[str, Outcome]:
        """The figures that the verdict rests on: measured ones where there are any."""
        return self.measured or self.predicted

    def as_json(self) -> dict[str, Any]:
        """The content of ``demo.json``."""
        return {
            "workload": self.workload,
            "setup": self.setup,
            "measured": {mode: outcome.as_json() for mode, outcome in self.measured.items()},
            "predicted": {mode: outcome.as_json() for mode, outcome in self.predicted.items()},
            "verdict": self.verdict._asdict(),
            "break_even_hbm_usage": self.curve.break_even if self.curve else None,
        }


def write(comparison: Comparison, folder: Path, stem: str) -> list[Path]:
    """Write ``<stem>.json``, ``<stem>.csv`` and ``<stem>.png`` into ``folder`` (made if absent); returns the paths.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}.{suffix}" for suffix in ("json", "csv", "png")]
    paths[0].write_text(json.dumps(comparison.as_json(), indent=2) + "\n", encoding="utf-8")
    _write_csv(comparison, paths[1])
    _write_png(comparison, paths[2])
    return paths


def _write_csv(comparison: Comparison, path: Path) -> None:
    rows = []
    for kind, outcomes in (("measured", comparison.measured), ("predicted", comparison.predicted)):
        for mode, outcome in outcomes.items():
            row: dict[str, Any] = {"kind": kind, "mode": mode, **outcome.as_json()}
            row |= {f"prompt_tokens_{source}": n for source, n in row.pop("prompt_tokens_by_source").items()}
            rows.append(row)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_png(comparison: Comparison, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    _plot_throughput(axes[0][0], comparison)
    _plot_sources(axes[0][1], comparison)
    _plot_ttft(axes[1][0], comparison)
    _plot_break_even(axes[1][1], comparison.curve)
    figure.suptitle(f"{comparison.workload['name']}: {comparison.verdict.reason}", fontsize=11)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_throughput(axes: Any, comparison: Comparison) -> None:
    for index, (mode, outcome) in enumerate(comparison.shown.items()):
        bar = axes.bar(index, outcome.throughput_tokens_per_second / 1e3, color=COLOURS[mode])
        axes.bar_label(bar, fmt="%.1f", label_type="center", color="white", fontweight="bold")
    predicted = [outcome.throughput_tokens_per_second / 1e3 for outcome in comparison.predicted.values()]
    if comparison.measured:
        axes.plot(range(len(predicted)), predicted, "kD", markersize=6, label="predicted")
        axes.legend(loc="lower right")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(comparison.shown)), list(comparison.shown))
    axes.set_ylabel("thousand tokens a second")
    axes.set_title("Throughput (prompt + generated)")


def _plot_sources(axes: Any, comparison: Comparison) -> None:
    bottom = [0.0] * len(comparison.shown)
    for source in SOURCES:
        tokens = [outcome.prompt_tokens_by_source[source] / 1e3 for outcome in comparison.shown.values()]
        axes.bar(range(len(tokens)), tokens, bottom=bottom, color=SOURCE_COLOURS[source], label=source)
        bottom = [b + t for b, t in zip(bottom, tokens, strict=True)]
    reprefill = [outcome.reprefill_tokens / 1e3 for outcome in comparison.shown.values()]
    axes.bar(
        range(len(reprefill)), reprefill, bottom=bottom, color="white", edgecolor="#c44e52", hatch="///",
        label="re-prefill",
    )  # fmt: skip
    axes.set_xticks(range(len(comparison.shown)), list(comparison.shown))
    axes.set_ylabel("thousand tokens")
    axes.set_title("Prompt tokens by source, and tokens computed again")
    axes.margins(y=0.1)
    axes.set_xlim(-0.6, len(comparison.shown) + 0.4)  # room for the legend beside the bars
    axes.legend(fontsize=8, loc="center right")


def _plot_ttft(axes: Any, comparison: Comparison) -> None:
    for index, (mode, outcome) in enumerate(comparison.shown.items()):
        axes.bar(index - 0.2, outcome.ttft_p50_seconds, width=0.4, color=COLOURS[mode])
        axes.bar(index + 0.2, outcome.ttft_p99_seconds, width=0.4, color=COLOURS[mode], alpha=0.5)
    axes.set_xticks(range(len(comparison.shown)), list(comparison.shown))
    axes.set_ylabel("seconds")
    axes.set_title("Time to first token: p50 (solid), p99 (pale)")
    axes.margins(y=0.1)


def _plot_break_even(axes: Any, curve: Curve | None) -> None:
    axes.set_title("Where a mode begins to pay (simulated)")
    axes.set_xlabel("HBM utilisation without offloading, %")
    axes.set_ylabel("throughput against none, %")
    axes.axhline(0, color="#8c8c8c", linewidth=1)
    if curve is None:
        axes.text(0.5, 0.5, "not swept", transform=axes.transAxes, ha="center")
        return
    usage = [level.hbm_usage * 100 for level in curve.levels]
    for mode, point in curve.break_even.items():
        axes.plot(usage, [level.gains[mode] * 100 for level in curve.levels], "o-", color=COLOURS[mode], label=mode)
        if point is not None:
            axes.axvline(point * 100, color=COLOURS[mode], linestyle=":", linewidth=1.2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -LEAST_GAIN_SHOWN), max(high, LEAST_GAIN_SHOWN))
    axes.legend(loc="upper left")
