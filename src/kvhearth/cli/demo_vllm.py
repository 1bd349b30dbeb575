"""``kvhearth demo --engine vllm``: the demo on real engines. `control.demo_vllm` measures; this shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rich.progress import Progress

from kvhearth.cli import console
from kvhearth.cli.workloads import check_out, unwritable
from kvhearth.control.demo_vllm import (
    ENGINES,
    ModeRun,
    Steps,
    conversations,
    make_model,
    measure_modes,
    stack_of_mode,
    verdict,
    write_report,
)
from kvhearth.cost.verdict import ORDER, gain
from kvhearth.planner.outcome import Served
from kvhearth.units import format_bytes


def demo_vllm(python: str | None, out: Path) -> None:
    """Run it and print the table.

    Args:
        python: interpreter that has vLLM; None = the one that runs kvhearth.
        out: folder for the model and the report.

    Raises:
        UserError: see `control.demo_vllm`; or ``out`` cannot be written.
    """
    check_out(out)
    python = python or sys.executable
    workload = conversations()
    model = make_model(python, out / "tiny-model")
    pool = stack_of_mode("native", python, model).pools[0]
    console.out.print(
        f"[bold]{workload.name}[/]: {workload.note}.\n"
        f"{workload.requests} requests of {len(workload.users)} users on {ENGINES} real vLLM engines on this CPU, with "
        f"a random Llama of 23 M parameters; each has HBM for {pool.num_gpu_blocks_override} blocks of "
        f"{pool.block_size} tokens and {format_bytes(pool.offload.dram_size)} of DRAM. Each mode has new engines.",
        soft_wrap=True,
    )
    with console.progress() as bar:
        shown = _Shown(bar, workload.requests)
        steps = Steps(shown.on_mode, shown.on_ready, shown.on_served)
        measured = measure_modes(workload, partial(stack_of_mode, python=python, model=model), steps)
    _show(measured)
    chosen = verdict(measured)
    console.out.print(f"[bold]Verdict: {chosen.mode}.[/] {chosen.reason}.", soft_wrap=True)
    console.out.print(
        "[dim]Measured once, on this machine's CPU; nothing is predicted, for the cost model knows GPUs only. Prompt "
        "shares and bytes are the engines' own counters.[/]",
        soft_wrap=True,
    )
    for mode, run in measured.items():
        if run.first_error is not None:
            console.warn(f"{mode}: {run.errors} failed, the first with: {run.first_error}")
    try:
        path = write_report(workload, measured, out)
    except OSError as error:
        raise unwritable(out, error) from None
    console.out.print(f"Written: {path}", soft_wrap=True)


_BYTES: tuple[tuple[str, Callable[[ModeRun], int]], ...] = (
    ("saved to DRAM", lambda run: run.counts.save_bytes),
    ("loaded from DRAM", lambda run: run.counts.load_bytes),
    ("put to the store", lambda run: run.counts.put_bytes),
    ("got from the store", lambda run: run.counts.get_bytes),
)


def _show(measured: Mapping[str, ModeRun]) -> None:
    table = console.table("", *measured, right=list(measured), title="measured on real vLLM")
    runs = list(measured.values())
    table.add_row("requests (errors)", *(f"{run.requests} ({run.errors})" for run in runs))
    table.add_row("throughput, tokens/s", *(f"{run.throughput_tokens_per_second:,.0f}" for run in runs))
    table.add_row("TTFT p50, s", *(f"{run.ttft_p50_seconds:.2f}" for run in runs))
    table.add_row("TTFT p99, s", *(f"{run.ttft_p99_seconds:.2f}" for run in runs))
    table.add_row("whole run, s", *(f"{run.seconds:.0f}" for run in runs))
    table.add_row("preemptions", *(f"{run.counts.preemptions}" for run in runs))
    for source in ("hbm", "dram", "store", "compute"):
        table.add_row(f"prompt from {source}", *(_share(run, source) for run in runs))
    for name, count in _BYTES:
        table.add_row(name, *(format_bytes(count(run)) for run in runs))
    baseline = measured[ORDER[0]].throughput_tokens_per_second
    table.add_row("gain over none", *(f"{gain(run.throughput_tokens_per_second, baseline):+.1%}" for run in runs))
    console.out.print(table)


def _share(run: ModeRun, source: str) -> str:
    counts = run.counts
    total = counts.hbm_tokens + counts.dram_tokens + counts.store_tokens + counts.compute_tokens
    return f"{getattr(counts, f'{source}_tokens') / total:.1%}" if total else "–"


class _Shown:
    """One bar for the whole, which says what is going on."""

    def __init__(self, bar: Progress, requests: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=requests * len(ORDER))

    def on_mode(self, mode: str) -> None:
        what = f"{mode}: starting {ENGINES} vLLM engines (a minute or so)"
        self._bar.update(self._task, description=what)
        if not console.err.is_terminal:
            console.err.print(f"{what} …")

    def on_ready(self, mode: str) -> None:
        self._bar.update(self._task, description=f"{mode}: measuring")

    def on_served(self, served: Served) -> None:
        self._bar.advance(self._task)
