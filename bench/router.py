"""What a router costs: ours, and others beside it where they are installed.

    python bench/router.py [--quick] [--rounds 5] [--vllm-router PATH] [--sglang-router PATH] [--production-stack PATH]

Two canned engines, a router and this load generator run as processes of their own on loopback, with 64 clients. What is
measured is CPU time of the router process (all its threads, from /proc), which other load on the machine disturbs far
less than elapsed time: of a POST with a prompt of 1.8 kB (8,192 tokens, in 32 kB of text, for the policies that follow
KV events), of an event of a stream of 64; the time that a router adds to a POST, one at a time; and its resident
memory. Systems take turns within a round; figures are medians over the rounds, ratios medians of each round's ratio.
The engines publish KV events for what they were asked, and render prompts to token ids for who asks.

Everything is on that a deployment has on: metrics, health checks, the end of a request whose client leaves, counting of
tokens. Our router runs by the interpreter that runs this: use one that is built as distributions build it (with PGO, as
Debian's python3), as the others are release builds too. `pip install vllm-router`, `pip install sglang-router`, or
production-stack's own, each into an environment of its own, and pass the path of its script. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
from typing import Any, NamedTuple

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from router_index import ingest, matching, memory
from support.routers import (
    BLOCK_TOKENS,
    PROMPT_BYTES,
    SSE_CHUNKS,
    Setting,
    System,
    cpu_seconds,
    drive,
    free_port,
    ours,
    production_stack,
    rss_mib,
    run_engine,
    running,
    sglang_router,
    vllm_router,
    wait_until_routing,
)

LONG_PROMPT_BYTES = 4 * 8192
FOLLOWS_EVENTS = frozenset({"kv-aware", "kv_aware"})
INDEX_TARGETS = 64
PEERS = ("vllm-router", "sglang-router", "production-stack")

TARGETS = (
    ("round-robin", "vllm-router", "round_robin", "cpu_us_per_request", 1.0),
    ("prefix", "vllm-router", "cache_aware", "cpu_us_per_request", 0.6),
    ("kv-aware", "vllm-router", "kv_aware", "cpu_us_per_request", 1.0),
    ("round-robin", "vllm-router", "round_robin", "cpu_us_per_chunk", 0.8),
    ("round-robin", "vllm-router", "round_robin", "added_p99_ms", 1.0),
    ("round-robin", "sglang-router", "round_robin", "cpu_us_per_request", 0.6),
    ("round-robin", "sglang-router", "round_robin", "cpu_us_per_chunk", 1.0),
    ("round-robin", "production-stack", "round_robin", "cpu_us_per_request", 0.1),
)
"""Which of our policies is compared with whose, in what, and how many times theirs it may be."""


class Load(NamedTuple):
    """How much is sent in a round."""

    posts: int
    long_posts: int
    streams: int
    single_posts: int


FULL, QUICK = Load(6400, 640, 192, 400), Load(1280, 192, 64, 120)


class Figures(NamedTuple):
    """Of one system in one round."""

    cpu_us_per_request: float
    cpu_us_per_chunk: float
    added_p50_ms: float
    added_p99_ms: float
    rss_mb: float


def measure(system: System, load: Load, direct: list[float]) -> Figures:
    """One round of one system; ``direct``: the times of single POSTs without a router, in seconds, sorted."""
    long = system.policy in FOLLOWS_EVENTS
    size = LONG_PROMPT_BYTES if long else PROMPT_BYTES
    posts = load.long_posts if long else load.posts
    with running(system.command) as process:
        wait_until_routing(system.port, process)
        uvloop.run(drive(system.port, posts // 4, random.Random(1), prompt_bytes=size))
        before = cpu_seconds(process.pid)
        uvloop.run(drive(system.port, posts, random.Random(2), prompt_bytes=size))
        post = (cpu_seconds(process.pid) - before) / posts
        before = cpu_seconds(process.pid)
        uvloop.run(drive(system.port, load.streams, random.Random(2), stream=True))
        chunk = (cpu_seconds(process.pid) - before) / load.streams / SSE_CHUNKS
        single = uvloop.run(drive(system.port, load.single_posts, random.Random(3), clients=1))
        return Figures(
            post * 1e6,
            chunk * 1e6,
            (quantile(single, 0.5) - quantile(direct, 0.5)) * 1e3,
            (quantile(single, 0.99) - quantile(direct, 0.99)) * 1e3,
            rss_mib(process.pid),
        )


def quantile(ordered: list[float], share: float) -> float:
    """Of sorted values, the one below which that share of them lies."""
    return ordered[int(share * (len(ordered) - 1))]


def systems(at: Setting, options: argparse.Namespace) -> list[System]:
    """What is compared: ours, and whoever is there."""
    found = [ours(at, policy) for policy in ("round-robin", "prefix", "kv-aware")]
    if options.vllm_router:
        found += [vllm_router(at, options.vllm_router, policy) for policy in ("round_robin", "cache_aware", "kv_aware")]
    if options.sglang_router:
        found.append(sglang_router(at, options.sglang_router))
    if options.production_stack:
        found.append(production_stack(at, options.production_stack))
    for name in PEERS:
        if not getattr(options, name.replace("-", "_")):
            print(f"skipped {name}: give the path of its script with --{name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds of a fifth, the index with 100,000 blocks")
    for name in PEERS:
        variable = name.replace("-", "_").upper()
        parser.add_argument(f"--{name}", metavar="PATH", default=os.environ.get(variable), help=f"script of {name}")
    parser.add_argument("--engine", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        uvloop.run(run_engine(*options.engine))
        return
    load, rounds, blocks = (QUICK, 2, 100_000) if options.quick else (FULL, options.rounds, 1_000_000)
    results: dict[tuple[str, str], list[Figures]] = {}
    with contextlib.ExitStack() as stack:
        pairs = [(free_port(), free_port()) for _ in range(2)]
        for port, events in pairs:
            stack.enter_context(running([sys.executable, __file__, "--engine", str(port), str(events)]))
        setting = Setting([f"http://127.0.0.1:{port}" for port, _ in pairs], [events for _, events in pairs])
        wait_until_routing(pairs[0][0], None)
        compared = systems(setting, options)
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        task = progress.add_task("routers", total=rounds * len(compared))
        for _ in range(rounds):
            direct = uvloop.run(drive(pairs[0][0], load.single_posts, random.Random(3), clients=1))
            for system in compared:
                progress.update(task, description=f"{system.name} {system.policy}")
                results.setdefault((system.name, system.policy), []).append(measure(system, load, direct))
                progress.advance(task)
    report(results, index_figures(blocks))


def index_figures(blocks: int) -> dict[str, float]:
    """What kv-aware stands on, alone: `bench/router_index.py` has more."""
    matched = matching(blocks, INDEX_TARGETS)
    return {
        "decision_p50_ms": matched[f"decision_{INDEX_TARGETS}_targets_ms"],
        "score_ms": matched[f"match_{INDEX_TARGETS}_targets_ms"],
        "ingest_blocks_per_second": round(ingest(blocks, INDEX_TARGETS, BLOCK_TOKENS)),
        "bytes_per_block_holder": memory(blocks)["bytes_per_block_holder"],
    }


def report(results: dict[tuple[str, str], list[Figures]], index: dict[str, float]) -> None:
    """A table, the ratios, and the JSON line."""
    medians = {key: Figures(*map(statistics.median, zip(*rounds, strict=True))) for key, rounds in results.items()}
    table = Table(title="medians")
    for column in ("router", "policy", "µs a request", "µs a chunk", "added p50 ms", "p99 ms", "RSS MiB"):
        table.add_column(column, justify="left" if column in {"router", "policy"} else "right")
    for (name, policy), found in medians.items():
        cells = [f"{found.cpu_us_per_request:,.0f}", f"{found.cpu_us_per_chunk:.1f}", f"{found.added_p50_ms:.2f}"]
        table.add_row(name, policy, *cells, f"{found.added_p99_ms:.2f}", f"{found.rss_mb:.0f}")
    Console(width=110).print(table)
    ratios: dict[str, dict[str, float]] = {}
    for mine, name, policy, figure, most in TARGETS:
        if (name, policy) in results:
            ratio = of_each_round(results["ours", mine], results[name, policy], figure)
            short = {"cpu_us_per_request": policy, "cpu_us_per_chunk": "chunk", "added_p99_ms": "added_p99"}[figure]
            ratios.setdefault(name, {})[short] = round(ratio, 3)
            print(f"{mine} / {name} {policy}, {figure}: {ratio:.2f} (target: at most {most})")
    print(f"kv-aware, {INDEX_TARGETS} engines: {index}")
    peers = {name: shown(medians, name) for name in PEERS if any(key[0] == name for key in medians)}
    print(json.dumps({"ours": shown(medians, "ours"), "peers": peers, "ratio": ratios, "kv_aware": index}))


def of_each_round(mine: list[Figures], theirs: list[Figures], figure: str) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(mine, theirs, strict=True)
    return float(statistics.median(getattr(a, figure) / max(1e-9, getattr(b, figure)) for a, b in pairs))


def shown(medians: dict[tuple[str, str], Figures], name: str) -> dict[str, Any]:
    """One system's figures: a request by policy, the rest with its plainest policy."""
    mine = {policy: found for (system, policy), found in medians.items() if system == name}
    plainest = next(iter(mine.values()))
    return {
        **{
            key.replace("-", "_"): {"cpu_us_per_request": round(one.cpu_us_per_request, 1)} for key, one in mine.items()
        },
        **{field: round(getattr(plainest, field), 3) for field in Figures._fields if field != "cpu_us_per_request"},
    }


if __name__ == "__main__":
    main()
