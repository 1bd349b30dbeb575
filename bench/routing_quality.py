"""How well each router routes, on emulated engines and over HTTP: ours with each policy, and vllm-router beside it.

    python bench/routing_quality.py [--quick] [--repeats 3] [--vllm-router PATH] [--data FOLDER]

Eight emulated H100 with an 8B model, each a process that publishes KV events as vLLM does, serve the first requests of
the Mooncake conversation trace (its recorded arrivals and lengths; text is made of its hash ids, the same for every
router), and then a burst of requests behind one hot prefix. Engines answer in emulated time, `--time-scale` times as
fast as the wall clock; their caches are emptied before each run. Systems take turns within a repeat.

Hit tokens are the engines' own count (`vllm:prefix_cache_hits`), times are the client's, in emulated milliseconds, and
max/mean is the busiest engine's requests over the mean engine's. Figures are medians over the repeats. A client or an
engine that lags makes all routers look alike, so the generator's own lag is printed too.

`pip install vllm-router` into an environment of its own, and pass the path of its script. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvhearth.metrics import parse_exposition
from kvhearth.planner.load import LoadConfig, LoadRun, play
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import Segment, Turn, User, Workload
from kvhearth.routing.registry import POLICY_NAMES
from router import Setting, free_port, ours, running, vllm_router

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MODEL = "llama-3.1-8b"
NAME = "m"
ENGINES = 8
STREAM_INTERVAL = 16
PEERS = ("cache_aware", "kv_aware")
MILLISECOND_NS = 1_000_000
DEADLINE_SECONDS = 60.0


class Figures(NamedTuple):
    """Of one run: what the engines counted, and what clients saw (emulated milliseconds)."""

    hit_tokens: float
    prompt_tokens: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    max_over_mean: float
    errors: int
    lag_ms: float


class Engines:
    """The emulated engines, and what they have counted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def counted(self, name: str) -> list[float]:
        """A counter of every engine."""
        return [sum(parse_exposition(_get(f"{url}/metrics")).get(name, {}).values()) for url in self.setting.urls]

    def forget(self) -> None:
        """Empty every cache."""
        for url in self.setting.urls:
            _get(f"{url}/reset_prefix_cache", post=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--time-scale", type=float, default=8.0, help="emulated seconds a second of the wall clock")
    parser.add_argument("--quick", action="store_true", help="one repeat of 150 requests, kv-aware and its rivals only")
    parser.add_argument(
        "--policy", action="append", choices=POLICY_NAMES, help="only this one of ours; may be repeated"
    )
    parser.add_argument("--vllm-router", metavar="PATH", default=os.environ.get("VLLM_ROUTER"))
    parser.add_argument("--data", type=Path, default=DATA, help="folder with mooncake_conversation.jsonl")
    options = parser.parse_args()
    policies = options.policy or list(POLICY_NAMES)
    if options.quick:
        options.requests, options.repeats = 150, 1
        policies = options.policy or ["round-robin", "prefix", "kv-aware"]
    names = [*policies, *(f"vllm-router {peer}" for peer in PEERS if options.vllm_router)]
    if not options.vllm_router:
        print("skipped vllm-router: give the path of its script with --vllm-router")
    workloads = {
        "mooncake": read_mooncake(options.data / "mooncake_conversation.jsonl", options.requests),
        "burst": burst(max(64, options.requests // 4)),
    }
    results: dict[str, dict[str, list[Figures]]] = {}
    with emulated(options.time_scale) as engines, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("routing", total=options.repeats * len(names) * len(workloads))
        for repeat in range(options.repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                for case, workload in workloads.items():
                    progress.update(task, description=f"{case}: {name}")
                    found = run(engines, name, workload, options)
                    results.setdefault(case, {}).setdefault(name, []).append(found)
                    progress.advance(task)
    report(results, names)


def run(engines: Engines, name: str, workload: Workload, options: argparse.Namespace) -> Figures:
    """One workload through one router, on engines that have cached nothing."""
    engines.forget()
    peer = name.removeprefix("vllm-router ")
    system = ours(engines.setting, name) if peer == name else vllm_router(engines.setting, options.vllm_router, peer)
    before = {counter: engines.counted(counter) for counter in COUNTERS}
    with running(system.command):
        wait_until_serving(system.port)
        config = LoadConfig(f"http://127.0.0.1:{system.port}", NAME, options.time_scale, request_timeout_seconds=120)
        played: LoadRun = asyncio.run(play(workload, config))
    hits, prompts, requests = (
        [now - then for now, then in zip(engines.counted(counter), before[counter], strict=True)]
        for counter in COUNTERS
    )
    whole = [served for served in played.served if served.error is None]
    for served in [served for served in played.served if served.error is not None][:1]:
        print(f"{name}: {served.error}", file=sys.stderr)
    times = sorted((served.first_token_ns - served.due_ns) / MILLISECOND_NS for served in whole) or [float("nan")]
    return Figures(
        sum(hits),
        sum(prompts),
        times[len(times) // 2],
        times[int(0.99 * (len(times) - 1))],
        max(requests) * len(requests) / max(1.0, sum(requests)),
        len(played.served) - len(whole),
        played.send_lag_seconds * 1e3,
    )


COUNTERS = ("vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total", "vllm:request_success_total")


def burst(requests: int) -> Workload:
    """Requests 4 ms apart, all behind one prefix of 4,000 tokens, each with 60 tokens of its own and short answers."""
    hot = Segment(1, 4000)
    users = (
        User(f"user-{i}", "t", i * 4 * MILLISECOND_NS, (Turn((hot, Segment(100 + i, 60)), 150),))
        for i in range(requests)
    )
    return Workload("burst", tuple(users))


@contextlib.contextmanager
def emulated(time_scale: float) -> Iterator[Engines]:
    """Eight engines that answer and tell their events."""
    with contextlib.ExitStack() as stack:
        pairs = [(free_port(), free_port()) for _ in range(ENGINES)]
        for number, (port, events) in enumerate(pairs):
            words = ["--model", MODEL, "--served-model-name", NAME, "--port", str(port), "--engine-id", str(number)]
            words += ["--time-scale", str(time_scale), "--stream-interval", str(STREAM_INTERVAL)]
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
            words += ["--kv-events-config", json.dumps(config)]
            code = "from kvhearth.cli.emulator import app; app()"
            stack.enter_context(running([sys.executable, "-c", code, "serve", *words]))
        for port, _ in pairs:
            wait_until_serving(port)
        yield Engines(Setting([f"http://127.0.0.1:{port}" for port, _ in pairs], [events for _, events in pairs]))


def wait_until_serving(port: int) -> None:
    """Until a completion comes back."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    body = json.dumps({"model": NAME, "prompt": "hello", "max_tokens": 1}).encode()
    while True:
        with contextlib.suppress(OSError):
            _get(f"http://127.0.0.1:{port}/v1/completions", body)
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody serves at port {port}")
        time.sleep(0.1)


def _get(url: str, body: bytes | None = None, *, post: bool = False) -> str:
    request = urllib.request.Request(
        url, body, {"content-type": "application/json"}, method="POST" if post or body else "GET"
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
        return str(response.read().decode())


def report(results: dict[str, dict[str, list[Figures]]], names: list[str]) -> None:
    """A table a workload, what kv-aware is to the others, and the JSON line."""
    console = Console(width=118)
    medians = {
        case: {name: Figures(*map(statistics.median, zip(*runs, strict=True))) for name, runs in systems.items()}
        for case, systems in results.items()
    }
    for case, systems in medians.items():
        table = Table(title=case)
        for column in ("router", "hit tokens", "of prompt", "TTFT p50 ms", "p99 ms", "max/mean", "errors", "lag ms"):
            table.add_column(column, justify="left" if column == "router" else "right")
        for name in names:
            found = systems[name]
            row = [f"{found.hit_tokens:,.0f}", f"{found.hit_tokens / max(1, found.prompt_tokens):.1%}"]
            row += [f"{found.ttft_p50_ms:,.0f}", f"{found.ttft_p99_ms:,.0f}", f"{found.max_over_mean:.2f}"]
            table.add_row(name, *row, f"{found.errors:.0f}", f"{found.lag_ms:.0f}")
        console.print(table)
    main_case, hot = medians["mooncake"], medians["burst"]
    if {"kv-aware", "round-robin"} <= main_case.keys():
        ratio = main_case["kv-aware"].hit_tokens / max(1.0, main_case["round-robin"].hit_tokens)
        print(f"kv-aware: {ratio:.2f} times the hit tokens of round-robin (target: at least 1.3)")
    if "kv-aware" in main_case:
        others = [found.ttft_p99_ms for name, found in main_case.items() if name != "kv-aware"]
        if others:
            best = main_case["kv-aware"].ttft_p99_ms / min(others)
            print(f"kv-aware: TTFT p99 {best:.2f} times the best of the others' (target: at most 1)")
        print(f"kv-aware: busiest engine {hot['kv-aware'].max_over_mean:.2f} times the mean on the burst (at most 1.5)")
    figures = {
        name: {
            **{field: round(getattr(main_case[name], field), 2) for field in Figures._fields},
            "burst_max_over_mean": round(hot[name].max_over_mean, 2),
            "burst_ttft_p99_ms": round(hot[name].ttft_p99_ms, 1),
        }
        for name in names
    }
    print(json.dumps({"bench": "routing_quality", "policies": figures}))


if __name__ == "__main__":
    main()
