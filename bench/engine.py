"""Steps per second of CPU time of the engine model, and of vLLM's own Scheduler beside it where vLLM is installed.

    python bench/engine.py [--quick] [--rounds 5]
    .venv-vllm/bin/python bench/engine.py          # after tests/vllm/install.sh

The same requests go to both, in turn within a round: prompts that share prefixes, 32 requests running, mode none; once
with room in HBM and once with so little that requests preempt each other. CPU time, because other load on the machine
disturbs it less than elapsed time. Figures are medians over the rounds, ratios medians of each round's ratio. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.engine import EngineConfig, EngineModel, EngineRequest, NoTransfers

BLOCK_SIZE = 16
RUNNING = 32
SAMPLED_TOKEN = 7


class Case(NamedTuple):
    """A size of HBM and the name it goes by."""

    name: str
    num_blocks: int


CASES = (Case("roomy", 4_000), Case("tight", 1_200))


class Request(NamedTuple):
    """A request as vLLM takes it (tokens) and as the engine model takes it (hashes of blocks)."""

    request_id: str
    prompt: list[int]
    output_tokens: int
    hashed: EngineRequest


def make_requests(count: int) -> list[Request]:
    """Prompts of about 800 tokens, half of it one of eight shared prefixes, and outputs of about 200."""
    rng = random.Random(1)
    requests = []
    for i in range(count):
        group = rng.randrange(8)
        prompt = [group * 1_000 + j for j in range(400)] + [rng.randrange(10_000, 20_000) for _ in range(400)]
        output = rng.randint(100, 300)
        tokens = [*prompt, *([SAMPLED_TOKEN] * output)]
        hashes: list[int] = []
        parent = 0
        for at in range(0, len(tokens) // BLOCK_SIZE * BLOCK_SIZE, BLOCK_SIZE):
            parent = hash((parent, *tokens[at : at + BLOCK_SIZE])) & (2**63 - 1)
            hashes.append(parent)
        requests.append(Request(f"r{i}", prompt, output, EngineRequest(f"r{i}", len(prompt), output, tuple(hashes))))
    return requests


def config_of(case: Case) -> EngineConfig:
    return EngineConfig(
        num_blocks=case.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=2_048,
        max_model_len=2_048,
    )


def run_ours(case: Case, requests: list[Request]) -> tuple[int, float, int]:
    """Steps, seconds and preemptions of the engine model."""
    engine, port = EngineModel(config_of(case)), NoTransfers()
    for request in requests:
        engine.submit(request.hashed)
    steps, begin = 0, time.process_time()
    while engine.has_work:
        engine.step(port)
        steps += 1
    return steps, time.process_time() - begin, engine.counters.preemptions


def run_theirs(oracle: Any, case: Case, requests: list[Request]) -> tuple[int, float, int]:
    """The same of vLLM's Scheduler."""
    engine = oracle.VllmScheduler(config_of(case))
    for request in requests:
        engine.submit(request.request_id, request.prompt, request.output_tokens)
    steps, preemptions, begin = 0, 0, time.process_time()
    while engine.has_work:
        preemptions += len(engine.step()[1])
        steps += 1
    return steps, time.process_time() - begin, preemptions


def load_oracle() -> Any:
    """The driver of vLLM's Scheduler, or None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "vllm"))
    return importlib.import_module("oracle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and rounds")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds, count = (2, 64) if args.quick else (args.rounds, 256)
    requests, oracle = make_requests(count), load_oracle()
    report: dict[str, dict[str, float]] = {}
    for case in CASES:
        ours, theirs = [], []
        for _ in range(rounds):
            steps, seconds, preemptions = run_ours(case, requests)
            ours.append(steps / seconds)
            if oracle is not None:
                their_steps, seconds, their_preemptions = run_theirs(oracle, case, requests)
                theirs.append(their_steps / seconds)
                if (steps, preemptions) != (their_steps, their_preemptions):
                    raise SystemExit(f"{case.name}: {steps} steps, vLLM {their_steps}: they did not do the same work")
        figures: dict[str, float] = {
            "steps": steps,
            "preemptions": preemptions,
            "steps_per_second": round(statistics.median(ours)),
        }
        line = f"{case.name}: {steps} steps, {preemptions} preemptions"
        line += f"; engine model {figures['steps_per_second']:,.0f} steps/s"
        if theirs:
            figures["vllm_steps_per_second"] = round(statistics.median(theirs))
            figures["ratio"] = round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2)
            line += f", vLLM's Scheduler {figures['vllm_steps_per_second']:,.0f}, ratio {figures['ratio']}"
        print(line)
        report[case.name] = figures
    print(json.dumps({"bench": "engine", "running": RUNNING, "rounds": rounds, **report}))


if __name__ == "__main__":
    main()
