"""How well each router routes, on emulated engines and over HTTP: ours with each policy, and vllm-router beside it.

    python bench/routing_quality.py [--quick] [--repeats 3] [--vllm-router PATH] [--data FOLDER]

Eight emulated engines (a 70B model on four H100 each) that publish KV events as vLLM does serve the first requests of
the Mooncake conversation trace at its recorded times, and then a burst behind one hot prefix. The trace gives lengths
and which 512 tokens are equal; text is made of that, the same for every router. 1,000 requests of it are 330 s and
13.7 M prompt tokens: prefill without any reuse would keep the engines busy 44 % of the time. Engines answer in emulated
time, `--time-scale` times as fast as the wall clock (the burst: as fast as it). Before each run their caches are
emptied and the router is a new one; routers take turns within a repeat, in the reverse order every other time. No
policy is told a conversation's name but `session`, which is sent what the trace suggests (`support.routing_load`).

Of each run: hit tokens as the engines count them (`vllm:prefix_cache_hits`), times to first token as the client sees
them from when a request was due (emulated milliseconds, so a wall millisecond in a router counts `--time-scale` times),
and two kinds of max/mean over the engines: `max_over_mean` of requests, `computed_max_over_mean` of prompt tokens that
had to be computed. Figures are medians over the repeats. A client or an engine that lags makes all routers look alike:
both lags are measured, and warned of when they are not small beside the times.
vllm-router has every engine render each prompt to token ids, ours one engine: here eight emulators on one machine pay
for that, at about 11 ms of CPU each. Where its runs are warned of, compare hits and loads, or lower `--time-scale`.

--quick is one repeat of 50 requests, at twice the pace, with three policies and both peers (about 50 s on two idle
cores); too few for a verdict on hits and the 99th percentile. The whole takes about 13 minutes a repeat.
`pip install vllm-router` into an environment of its own, and pass the path of its script. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from support.routers import ours, running, vllm_router
from support.routing_load import Engines, Played, emulated, play, wait_until_serving

from kvhearth.emulator.config import EmulatorConfig
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import Segment, Turn, User, Workload
from kvhearth.routing.registry import POLICY_NAMES

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
ENGINES = 8
SHAPE = EmulatorConfig(model="llama-3.1-70b", gpu="h100-sxm", tensor_parallel_size=4, stream_interval=16)
QUICK_REQUESTS, QUICK_TIME_SCALE, QUICK_POLICIES = 50, 8.0, ("round-robin", "prefix", "kv-aware")
BURST_REQUESTS = 256
PEERS = ("cache_aware", "kv_aware")
MILLISECOND_NS = 1_000_000
TIME_SCALE = 4.0
"""So that client, engines and router together need no more than half of two cores."""

LAG_SHARE = 0.1
"""A lag above this share of the median time to first token is warned of."""

P99_TOLERANCE = 1.03
"""The longest prompts, which no policy shortens, are the 99th percentile: differences below this are noise."""

HITS, PROMPTS, REQUESTS = COUNTERS = (
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:request_success_total",
)


class Figures(NamedTuple):
    """Of one run: what the engines counted, and what clients saw (emulated milliseconds)."""

    hit_tokens: float
    prompt_tokens: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    max_over_mean: float
    computed_max_over_mean: float
    failures: float
    client_lag_ms: float
    engine_lag_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--time-scale", type=float, help="emulated seconds a second of the wall clock (4; 8 with --quick)"
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of 50 requests, fewer policies")
    parser.add_argument(
        "--policy", action="append", choices=POLICY_NAMES, help="only this one of ours; may be repeated"
    )
    parser.add_argument("--vllm-router", metavar="PATH", default=os.environ.get("VLLM_ROUTER"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with mooncake_conversation.jsonl")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.repeats = QUICK_REQUESTS, 1
    options.time_scale = options.time_scale or (QUICK_TIME_SCALE if options.quick else TIME_SCALE)
    signal.signal(signal.SIGTERM, _end)
    policies = options.policy or list(QUICK_POLICIES if options.quick else POLICY_NAMES)
    names = [*policies, *(f"vllm-router {peer}" for peer in PEERS if options.vllm_router)]
    if not options.vllm_router:
        print("skipped vllm-router: give the path of its script with --vllm-router")
    workloads = {"burst": burst(BURST_REQUESTS)}
    trace = options.data / "mooncake_conversation.jsonl"
    if trace.is_file():
        workloads = {"mooncake": read_mooncake(trace, options.requests), **workloads}
    else:
        print(f"skipped the trace, which is not at {trace}: give its folder with --data")
    results: dict[str, dict[str, list[Figures]]] = {case: {name: [] for name in names} for case in workloads}
    for case, workload in workloads.items():
        scale = options.time_scale if case == "mooncake" else 1.0
        with emulated(ENGINES, SHAPE, scale) as engines, Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(case, total=options.repeats * len(names))
            for repeat in range(options.repeats):
                for name in names if repeat % 2 == 0 else reversed(names):
                    progress.update(task, description=f"{case}: {name}")
                    found = run(engines, name, workload, scale, options.vllm_router)
                    results[case][name].append(found)
                    progress.advance(task)
    report(results, names)


def run(engines: Engines, name: str, workload: Workload, time_scale: float, vllm_script: str) -> Figures:
    """The workload through a new router, on engines that have cached nothing."""
    peer = name.removeprefix("vllm-router ")
    system = ours(engines.setting, name) if peer == name else vllm_router(engines.setting, vllm_script, peer)
    with running(system.command):
        wait_until_serving(system.port)
        engines.forget()
        before = {counter: engines.counted(counter) for counter in COUNTERS}
        lag_before = engines.lag()
        played = asyncio.run(play(workload, system.port, time_scale, sessions=name == "session"))
        counted = {
            counter: [now - then for now, then in zip(engines.counted(counter), before[counter], strict=True)]
            for counter in COUNTERS
        }
        late, steps = (now - then for now, then in zip(engines.lag(), lag_before, strict=True))
    return judge(f"{name}, {workload.name}", played, counted, late / max(1.0, steps))


def judge(run_name: str, played: Played, counted: dict[str, list[float]], engine_lag_seconds: float) -> Figures:
    """The figures of one run; warns of failures and of lag."""
    times = sorted(seconds * 1e3 for seconds in played.ttft_seconds) or [float("nan")]
    computed = [prompts - hits for prompts, hits in zip(counted[PROMPTS], counted[HITS], strict=True)]
    p50 = times[len(times) // 2]
    if played.faults:
        print(f"{run_name}: {len(played.faults)} requests failed, one by {played.faults[0]}", file=sys.stderr)
    for who, seconds in (("client", played.lag_seconds), ("mean engine", engine_lag_seconds)):
        if seconds * 1e3 > LAG_SHARE * p50:
            print(f"{run_name}: warning: the {who} was {seconds * 1e3:.0f} emulated ms late", file=sys.stderr)
    return Figures(
        sum(counted[HITS]),
        sum(counted[PROMPTS]),
        p50,
        times[int(0.99 * (len(times) - 1))],
        max_over_mean(counted[REQUESTS]),
        max_over_mean(computed),
        len(played.faults),
        played.lag_seconds * 1e3,
        engine_lag_seconds * 1e3,
    )


def max_over_mean(loads: list[float]) -> float:
    """The busiest engine's load over the mean engine's; 0 where there was none."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 0.0


def burst(requests: int) -> Workload:
    """Requests 12 ms apart, all behind one prefix of 4,000 tokens, each with 60 tokens of its own and short answers."""
    hot = Segment(1, 4000)
    users = (
        User(f"user-{i}", "t", i * 12 * MILLISECOND_NS, (Turn((hot, Segment(100 + i, 60)), 150),))
        for i in range(requests)
    )
    return Workload("burst", tuple(users))


def report(results: dict[str, dict[str, list[Figures]]], names: list[str]) -> None:
    """A table a workload, what kv-aware is to the others, and the JSON line."""
    console = Console(width=132)
    medians = {
        case: {name: Figures(*map(statistics.median, zip(*runs, strict=True))) for name, runs in systems.items()}
        for case, systems in results.items()
    }
    for case, systems in medians.items():
        table = Table(title=case)
        table.add_column("router", no_wrap=True)
        for column in (
            "hit tokens",
            "of prompt",
            "TTFT p50 ms",
            "p99 ms",
            "max/mean",
            "computed",
            "failed",
            "client lag",
            "engine lag",
        ):
            table.add_column(column, justify="right")
        for name in names:
            found = systems[name]
            row = [f"{found.hit_tokens:,.0f}", f"{found.hit_tokens / max(1, found.prompt_tokens):.1%}"]
            row += [f"{found.ttft_p50_ms:,.0f}", f"{found.ttft_p99_ms:,.0f}"]
            row += [f"{found.max_over_mean:.2f}", f"{found.computed_max_over_mean:.2f}"]
            table.add_row(
                name, *row, f"{found.failures:.0f}", f"{found.client_lag_ms:.0f}", f"{found.engine_lag_ms:.0f}"
            )
        console.print(table)
    main_case = medians.get("mooncake", medians["burst"])
    verdict(main_case, medians["burst"])
    figures = {
        name: {
            **{field: round(getattr(main_case[name], field), 2) for field in Figures._fields},
            "burst_max_over_mean": round(medians["burst"][name].max_over_mean, 2),
            "burst_ttft_p99_ms": round(medians["burst"][name].ttft_p99_ms, 1),
        }
        for name in names
    }
    print(json.dumps({"policies": figures}))


def verdict(trace: dict[str, Figures], hot: dict[str, Figures]) -> None:
    """Whether kv-aware is what it should be, in words."""
    if "kv-aware" not in trace:
        return
    own = trace["kv-aware"]
    if "round-robin" in trace:
        ratio = own.hit_tokens / max(1.0, trace["round-robin"].hit_tokens)
        print(f"{_mark(ratio >= 1.3)} kv-aware: {ratio:.2f} times the hit tokens of round-robin (at least 1.3)")
    others = {name: found.ttft_p99_ms for name, found in trace.items() if name != "kv-aware"}
    if others:
        best = min(others, key=others.__getitem__)
        ratio = own.ttft_p99_ms / others[best]
        print(
            f"{_mark(ratio <= P99_TOLERANCE)} kv-aware: TTFT p99 {ratio:.2f} times that of {best}, the best other "
            f"(at most 1, differences below {P99_TOLERANCE - 1:.0%} are noise)"
        )
    crowd = hot["kv-aware"].max_over_mean
    print(f"{_mark(crowd <= 1.5)} kv-aware: busiest engine {crowd:.2f} times the mean on the burst (at most 1.5)")


def _end(number: int, _frame: object) -> None:
    """SIGTERM unwinds as Ctrl-C does, so that engines and routers end."""
    sys.exit(128 + number)


def _mark(good: bool) -> str:
    return "ok    " if good else "MISSED"


if __name__ == "__main__":
    main()
