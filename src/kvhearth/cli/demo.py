"""``kvhearth demo``: one workload without offloading, with DRAM and with the store, measured and predicted."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from kvhearth.cli import console
from kvhearth.cli.demo_vllm import demo_vllm
from kvhearth.cli.tables import comparison_table
from kvhearth.cli.workloads import (
    RequestsOption,
    SeedOption,
    TraceOption,
    WorkloadOption,
    check_out,
    read_workload,
    write_report,
)
from kvhearth.control.demo import MODES, Scenario, Steps, compare, measure_modes
from kvhearth.control.measure import Measured
from kvhearth.errors import UserError
from kvhearth.planner.breakeven import Curve, runs_of, sweep
from kvhearth.planner.deployment import cluster_of
from kvhearth.planner.outcome import Served
from kvhearth.planner.workload import Slo, Workload
from kvhearth.units import format_bytes

_MOST_ERRORS_SHOWN = 3


class EngineKind(Enum):
    """What the demo runs on."""

    EMULATED = "emulated"
    VLLM = "vllm"


def demo(
    workload: WorkloadOption = None,
    trace: TraceOption = None,
    requests: RequestsOption = None,
    seed: SeedOption = 0,
    out: Annotated[Path, typer.Option(help="Folder for demo.json, demo.csv and demo.png.")] = Path("report"),
    time_scale: Annotated[
        float | None,
        typer.Option(
            min=0.25, max=100, help="Emulated seconds a second; by default as fast as this machine keeps up with."
        ),
    ] = None,
    engine: Annotated[
        EngineKind, typer.Option(help="vllm: two real engines on this CPU, with a workload of their own.")
    ] = EngineKind.EMULATED,
    python: Annotated[
        str | None, typer.Option(help="With --engine vllm: interpreter of the environment that has vLLM and kvhearth.")
    ] = None,
) -> None:
    """Show what offloading saves, on this machine and without a GPU: 4 emulated H100 serve one workload three times.

    Every run goes through the real router and, in mode shared, the real store. Beside each measured figure stands what
    the simulator predicts for the same workload. Both share one engine model, so agreement checks the plumbing.

    **Examples**

    - `kvhearth demo`

    - `kvhearth demo --workload no-reuse`: short prompts that share nothing, where offloading does not pay

    - `kvhearth demo --trace conversation.jsonl --requests 1000 --out report/mooncake`

    - `kvhearth demo --engine vllm --python .venv-vllm/bin/python`: the real thing, small, in some five minutes
    """
    if engine is EngineKind.VLLM:
        _only_for_emulated(workload, trace, requests, seed, time_scale)
        demo_vllm(python, out)
        return
    if python is not None:
        raise UserError(f"{python!r} without --engine vllm", where="--python", remedy="add it, or leave this out")
    check_out(out)
    played = read_workload(workload, trace, requests, seed, Scenario.most_tokens())
    scenario = Scenario().for_workload(played)
    _introduce(played, scenario)
    with console.progress() as bar:
        curve = _predict(played, scenario, bar)
        measured = _measure(played, scenario, curve, time_scale, bar)
    comparison = compare(played, scenario.describe(), measured, curve.full, curve)
    console.out.print(comparison_table(comparison))
    console.out.print(f"[bold]Verdict: {comparison.verdict.mode}.[/] {comparison.verdict.reason}.", soft_wrap=True)
    _footnotes(measured, played.slo)
    paths = write_report(comparison, out, "demo")
    console.out.print("Written: " + ", ".join(str(path) for path in paths), soft_wrap=True)


def _only_for_emulated(
    workload: str | None, trace: Path | None, requests: int | None, seed: int, time_scale: float | None
) -> None:
    """Refuse options that real engines do not heed."""
    given = {
        "--workload": workload,
        "--trace": trace,
        "--requests": requests,
        "--seed": seed,
        "--time-scale": time_scale,
    }
    for option, value in given.items():
        if value not in (None, 0):
            raise UserError(f"{value} with --engine vllm", where=option, remedy="leave it out")


def _introduce(workload: Workload, scenario: Scenario) -> None:
    about = scenario.describe()
    enough = " (enough for the longest request)" if scenario.hbm_blocks > Scenario().hbm_blocks else ""
    console.out.print(
        f"[bold]{workload.name}[/]: {workload.note}.\n"
        f"{workload.requests:,} requests on {about['engines']} emulated {about['gpu']} with {about['model']}, "
        f"each with {about['hbm_kv_tokens_per_engine']:,} KV tokens of HBM{enough} "
        f"and {format_bytes(scenario.dram_bytes)} of DRAM; "
        f"the store holds {format_bytes(scenario.store_kv_bytes)} of KV "
        f"(as 1 real byte for {scenario.store_bytes_scale:,}).",
        soft_wrap=True,
    )


def _predict(workload: Workload, scenario: Scenario, bar: Progress) -> Curve:
    clusters = {mode: cluster_of(scenario.stack(mode)) for mode in MODES}
    task = bar.add_task("simulating", total=runs_of(workload, clusters))
    return sweep(workload, clusters, on_run=lambda: bar.advance(task))


def _measure(
    workload: Workload, scenario: Scenario, curve: Curve, time_scale: float | None, bar: Progress
) -> dict[str, Measured]:
    task = bar.add_task("measuring", total=len(MODES) * workload.requests)
    shown = _Shown(bar, task, workload.requests)
    steps = Steps(shown.on_mode, shown.on_served, shown.on_restart)
    return measure_modes(workload, scenario, curve.full, time_scale=time_scale, steps=steps)


class _Shown:
    """Keeps the bar of the measurements true, also when a run begins again."""

    def __init__(self, bar: Progress, task: TaskID, requests: int) -> None:
        self._bar = bar
        self._task = task
        self._requests = requests
        self._modes = 0

    def on_mode(self, mode: str) -> None:
        self._bar.update(self._task, completed=self._modes * self._requests, description=f"measuring {mode}")
        self._modes += 1

    def on_served(self, served: Served) -> None:
        self._bar.advance(self._task)

    def on_restart(self, time_scale: float, lag_seconds: float) -> None:
        self._bar.update(self._task, completed=(self._modes - 1) * self._requests)
        console.warn(f"lagged {lag_seconds:.3f} emulated seconds behind: again at time scale {time_scale:.2f}")


def _footnotes(measured: dict[str, Measured], slo: Slo) -> None:
    console.out.print(
        f"[dim]Goodput: first token within {slo.ttft_seconds:g} s, {slo.tpot_seconds * 1000:g} ms a token after it. "
        "Re-prefills avoided: admissions, first ones or after a preemption, that took from DRAM or the store what they "
        "would have computed. HBM use: what running requests hold on average, without offloading.[/]",
        soft_wrap=True,
    )
    clocks = ", ".join(f"{mode} {run.time_scale:.1f}× (lag {run.lag_seconds:.3f} s)" for mode, run in measured.items())
    console.out.print(
        f"[dim]Clock: {clocks}. All times are emulated seconds; lag is how late tokens came, on average.[/]",
        soft_wrap=True,
    )
    faults = [served for run in measured.values() for served in run.served if served.error is not None]
    for served in faults[:_MOST_ERRORS_SHOWN]:
        console.warn(f"{served.user}, turn {served.turn}: {served.error}")
