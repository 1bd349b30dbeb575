"""How well each routing policy routes, in virtual time: ``python bench/routing_virtual.py [--quick] [--data FOLDER]``.

Hit tokens (prompt tokens not computed), time to first token, and the busiest engine's requests over the mean engine's,
for every policy on: a Mooncake trace and the agentic sessions (where the folder has them), generated conversations of
many tenants, and a burst of requests behind one hot prefix. kv-aware learns through the router's own index, from the
engines' events. Nothing is timed: the same arguments give the same figures.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvhearth.cost import CostModel
from kvhearth.engine.links import DEFAULT_STORE_LINK, modelled_links
from kvhearth.engine.ports import EngineConfig, OffloadMode
from kvhearth.engine.sizing import size_engine
from kvhearth.planner.cluster import ClusterConfig, Simulated, simulate
from kvhearth.planner.generate import generate
from kvhearth.planner.sessions import read_sessions
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import Segment, Turn, User, Workload, total_tokens
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.registry import POLICY_NAMES
from kvhearth.routing.ttft import ModelledCost

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
COST = CostModel("llama-3.1-8b", "h100-sxm")
BLOCKS_PER_CHUNK = 8
MILLISECOND_NS = 1_000_000
INDEX_BYTES = 1 << 30
PRIMARY = "mooncake"


class Case(NamedTuple):
    """A workload on a cluster."""

    name: str
    workload: Workload
    cluster: ClusterConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the requests")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with mooncake_conversation.jsonl and agentic/")
    parser.add_argument("--policy", action="append", choices=POLICY_NAMES, help="only this one; may be repeated")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    policies = arguments.policy or list(POLICY_NAMES)
    result: dict[str, dict[str, dict[str, float]]] = {}
    for case in cases(arguments.data, quick=arguments.quick):
        if arguments.case and case.name not in arguments.case:
            continue
        print(f"\n{case.name}: {case.workload.requests} requests on {case.cluster.engines} engines", flush=True)
        print(f"{'policy':<14}{'hit tokens':>14}{'of prompt':>11}{'TTFT p50':>12}{'p99':>12}{'max/mean':>10}")
        for policy in policies:
            figures = run(case, policy)
            result.setdefault(case.name, {})[policy] = figures
            hits = f"{figures['hit_tokens']:>14,}{figures['hit_share']:>11.1%}"
            times = f"{figures['ttft_p50_ms']:>9,.0f} ms{figures['ttft_p99_ms']:>9,.0f} ms"
            print(f"{policy:<14}{hits}{times}{figures['max_over_mean']:>10.2f}", flush=True)
    print(json.dumps({"policies": result.get(PRIMARY, {}), "cases": result}))


def run(case: Case, policy: str) -> dict[str, float]:
    """The figures of one policy on one case."""
    index_bytes = INDEX_BYTES if policy == KvAware.name else 0
    simulated = simulate(case.workload, replace(case.cluster, policy=policy, index_bytes=index_bytes))
    sources = simulated.outcome.prompt_tokens_by_source
    hits = sum(tokens for source, tokens in sources.items() if source != "compute")
    return {
        "hit_tokens": hits,
        "hit_share": hits / sum(sources.values()),
        "ttft_p50_ms": simulated.outcome.ttft_p50_seconds * 1e3,
        "ttft_p99_ms": simulated.outcome.ttft_p99_seconds * 1e3,
        "max_over_mean": max_over_mean(simulated, case.cluster.engines),
    }


def max_over_mean(simulated: Simulated, engines: int) -> float:
    """Requests of the busiest engine over those of the mean one."""
    sent = Counter(served.engine for served in simulated.served)
    return max(sent.values()) * engines / len(simulated.served)


def cases(data: Path, *, quick: bool) -> Iterator[Case]:
    """All cases for which there is data."""
    part = 3 if quick else 1
    trace = data / "mooncake_conversation.jsonl"
    if trace.exists():
        workload = read_mooncake(trace, 1000 // part)
        yield Case(PRIMARY, workload, cluster(8, OffloadMode.NONE))
        yield Case("mooncake, shared", workload, cluster(8, OffloadMode.SHARED))
    sessions = data / "agentic"
    if sessions.exists():
        shape = cluster(4, OffloadMode.NATIVE)
        yield Case("agentic", short_enough(read_sessions(sessions), shape.engine.max_model_len), shape)
    yield Case("multi-tenant", generate("multi-tenant").with_users(80 // part), cluster(4, OffloadMode.NONE, 4000))
    yield Case("burst", burst(256 // part), cluster(4, OffloadMode.NONE))


def short_enough(workload: Workload, tokens: int) -> Workload:
    """Without the requests that no engine takes."""
    fitting = (
        user
        for user in workload.users
        if all(total_tokens(turn.segments) + turn.output_tokens <= tokens for turn in user.turns)
    )
    return replace(workload, users=tuple(fitting))


def burst(requests: int) -> Workload:
    """Requests 4 ms apart, all behind one prefix of 4,000 tokens, each with 60 tokens of its own and short answers."""
    hot = Segment(1, 4000)
    users = (
        User(f"user-{i}", "t", i * 4 * MILLISECOND_NS, (Turn((hot, Segment(100 + i, 60)), 150),))
        for i in range(requests)
    )
    return Workload("burst", tuple(users))


def cluster(engines: int, mode: OffloadMode, blocks: int | None = None) -> ClusterConfig:
    """H100 with an 8B model each; ``blocks`` of HBM, or what is left beside the weights."""
    engine: EngineConfig = size_engine(
        COST,
        gpu_memory_utilization=0.92,
        num_gpu_blocks_override=blocks,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=None,
        mode=mode,
        dram_bytes=64 * 2**30,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
    )
    return ClusterConfig(
        engines,
        engine,
        COST,
        partial(modelled_links, COST, DEFAULT_STORE_LINK, engine.chunk_bytes),
        store_chunks=400 * 2**30 // engine.chunk_bytes if mode is OffloadMode.SHARED else 0,
        ttft_cost=ModelledCost(COST, DEFAULT_STORE_LINK, engine.chunk_bytes),
    )


if __name__ == "__main__":
    main()
