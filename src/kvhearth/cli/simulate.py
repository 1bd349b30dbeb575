"""``kvhearth simulate``: a workload in virtual time on a Stack, mode by mode. Measures nothing and starts nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli import console
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
from kvhearth.control.demo import Scenario, compare
from kvhearth.cost.verdict import ORDER
from kvhearth.errors import UserError
from kvhearth.planner.breakeven import FRACTIONS, runs_of, sweep
from kvhearth.planner.deployment import cluster_of, most_tokens, with_mode
from kvhearth.stack import Stack


def simulate(
    stack: Annotated[
        Path | None,
        typer.Option(
            help="The Stack file to play it on, in every mode it can have; by default what `kvhearth demo` runs."
        ),
    ] = None,
    workload: WorkloadOption = None,
    trace: TraceOption = None,
    requests: RequestsOption = None,
    seed: SeedOption = 0,
    break_even: Annotated[
        bool, typer.Option("--break-even", help="Also find the HBM use from which each mode pays (4 times the work).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for simulate.json, simulate.csv and simulate.png.")] = None,
) -> None:
    """Play a workload in virtual time on a deployment, with each offload mode it can have, and say which one to choose.

    **Examples**

    - `kvhearth simulate --workload rag --break-even`

    - `kvhearth simulate --stack examples/local.yaml --trace conversation.jsonl --requests 1000 --out report`
    """
    if out is not None:
        check_out(out)
    described: dict[str, object]
    if stack is None:
        played = read_workload(workload, trace, requests, seed, Scenario.most_tokens())
        scenario = Scenario().for_workload(played)
        stacks, described = {mode: scenario.stack(mode) for mode in ORDER}, scenario.describe()
    else:
        deployment = Stack.from_yaml(stack)
        _check_modelled(deployment, str(stack))
        modes = [mode for mode in ORDER if mode != "shared" or deployment.store is not None]
        stacks = {mode: with_mode(deployment, mode) for mode in modes}
        played = read_workload(workload, trace, requests, seed, most_tokens(deployment))
        described = {"stack": str(stack)}
    clusters = {mode: cluster_of(each) for mode, each in stacks.items()}
    fractions = FRACTIONS if break_even else ()
    with console.progress() as bar:
        task = bar.add_task("simulating", total=runs_of(played, clusters, fractions))
        curve = sweep(played, clusters, fractions, on_run=lambda: bar.advance(task))
    comparison = compare(played, described, {}, curve.full, curve if break_even else None)
    if as_json:
        json.dump(comparison.as_json(), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        console.out.print(f"[bold]{played.name}[/]: {played.note}; {played.requests:,} requests.", soft_wrap=True)
        console.out.print(comparison_table(comparison))
        console.out.print(f"[bold]Verdict: {comparison.verdict.mode}.[/] {comparison.verdict.reason}.", soft_wrap=True)
    if out is not None:
        paths = write_report(comparison, out, "simulate")
        if not as_json:
            console.out.print("Written: " + ", ".join(str(path) for path in paths), soft_wrap=True)


def _check_modelled(stack: Stack, where: str) -> None:
    """Raises:
    UserError: something that the simulator has no model of.
    """
    for index, pool in enumerate(stack.pools):
        place = f"{where}: pools[{index}]"
        if pool.offload.mode == "lmcache":
            raise UserError(
                "'lmcache' is run, not modelled", where=f"{place}.offload.mode", remedy="simulate mode native or shared"
            )
        if pool.vllm.device == "cpu":
            raise UserError(
                "engines on a CPU are not modelled", where=f"{place}.vllm.device", remedy="measure them instead"
            )
