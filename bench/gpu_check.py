"""Checks of offloading on the real vLLM where a GPU is:  python bench/gpu_check.py [--device auto|cpu|cuda] [--quick]

On a machine without a GPU the same checks run on vLLM's CPU backend. Three questions, each to real engines and a store:

* Are restored KV bytes right? Log-probabilities after a restore from DRAM, and from the store in an engine that never
  saw the prompt, must equal those after a prefix hit in HBM of the same length, bit for bit. (Not those of a cold
  prompt: its prefill is split differently, which already moves the last bits.)
* How fast do chunks move, by chunk size (`blocks_per_chunk`): bytes over time as vLLM counts them, HBM to DRAM, DRAM to
  HBM, and between DRAM and the store?
* What does offloading cost where it gains nothing: throughput on prompts that share nothing, mode native over mode
  none, in alternating rounds?

`--model DIR` takes a model of your own instead of the random Llama; then set `--dram` to hold three prompts of 2,572
tokens (1 GiB for a Llama of 8 B). Exit code 1 when a log-probability differs or a prompt was not restored. The last
line is JSON; without vLLM it says that nothing was checked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from support.engine import Engine, end_children_on_sigterm, engine, tiny_llama, transfer_config, vllm_python
from support.store import Store, store_server

from kvhearth.errors import UserError
from kvhearth.units import parse_bytes

# Whole chunks of 16 blocks on either device, and a rest shorter than a block: a hit in HBM ends where a restore does.
PROMPT_TOKENS = 5 * 512 + 12
HBM_TOKENS = 5120
PROMPTS = 3
ANSWER_TOKENS = 16
MOVES = {
    "hbm_to_dram": ("vllm:kv_offload_store_bytes_total", "vllm:kv_offload_store_time_total", {}),
    "dram_to_hbm": ("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total", {}),
    "dram_to_store": (
        "vllm:kv_offload_tiering_write_bytes_total",
        "vllm:kv_offload_tiering_write_time_total",
        {"tier": "1:StoreTier"},
    ),
    "store_to_dram": (
        "vllm:kv_offload_tiering_read_bytes_total",
        "vllm:kv_offload_tiering_read_time_total",
        {"tier": "1:StoreTier"},
    ),
}
SETTLE_SECONDS = 60.0

Tokens = list[int]


class Plan(NamedTuple):
    """What is checked on which device."""

    python: str
    model: Path
    folder: Path
    cuda: bool
    dram_bytes: int
    chunk_sizes: tuple[int, ...]
    rounds: int

    @property
    def block_tokens(self) -> int:
        """Tokens a block: the least that the device's attention kernels take."""
        return 16 if self.cuda else 32

    @contextlib.contextmanager
    def engine(self, config: dict[str, Any] | None) -> Iterator[Engine]:
        """A running engine whose HBM holds one prompt and most of another."""
        flags = ["--block-size", str(self.block_tokens), "--max-model-len", "4096"]
        flags += ["--num-gpu-blocks-override", str(HBM_TOKENS // self.block_tokens)]
        if self.cuda:
            flags += ["--gpu-memory-utilization", "0.4"]  # two engines share it in the last check
        with engine(self.python, self.model, self.folder, config, flags=flags, cuda=self.cuda) as running:
            yield running


def main() -> None:
    given = arguments()
    end_children_on_sigterm()
    python = vllm_python(given.python)
    if python is None:
        print("skipped: no vLLM here; name its interpreter with --python")
        print(json.dumps({"bench": "gpu_check", "skipped": "no vLLM"}))
        return
    cuda = has_cuda(python) if given.device == "auto" else given.device == "cuda"
    with tempfile.TemporaryDirectory(prefix="kvhearth-gpu-check-") as name:
        folder = Path(name)
        sizes, rounds = ((1, 4), 3) if given.quick else ((1, 2, 4, 8, 16), 7)
        model = given.model.resolve() if given.model else tiny_llama(python, folder)
        plan = Plan(python, model, folder, cuda, given.dram, sizes, rounds)
        print(f"device {'cuda' if cuda else 'cpu'}, model {model.name}", flush=True)
        with store_server(folder, 2 * given.dram) as store:
            found = check(plan, store)
    report(found)
    sys.exit(0 if found["identical"] else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there is")
    parser.add_argument("--quick", action="store_true", help="two chunk sizes and fewer rounds")
    parser.add_argument("--python", help="interpreter that has vLLM (default: .venv-vllm of the repository)")
    parser.add_argument("--model", type=Path, help="folder of a model instead of the random Llama")
    parser.add_argument("--dram", type=size, default=size("256MiB"), help="DRAM of an engine (default 256MiB)")
    return parser.parse_args()


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except (UserError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def has_cuda(python: str) -> bool:
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], cwd="/", check=False, capture_output=True).returncode == 0


def check(plan: Plan, store: Store) -> dict[str, Any]:
    """Each chunk size in two engines, one after the other; then the cost of offloading in two at once."""
    draw = random.Random(0)
    chunks: dict[str, Any] = {}
    for blocks in plan.chunk_sizes:
        print(f"... chunks of {blocks} blocks", flush=True)
        prompts = [new_prompt(draw, PROMPT_TOKENS) for _ in range(PROMPTS)]
        config = transfer_config(plan.dram_bytes, store.tcp, patience_seconds=30.0, blocks_per_chunk=blocks)
        held = store.values()
        with plan.engine(config) as first:
            hits = compute_then_hit(first, prompts)
            from_dram = [logprobs(first, prompt) for prompt in prompts]
            wanted = held + PROMPTS * (PROMPT_TOKENS // (blocks * plan.block_tokens))
            await_values(store, wanted)
            moved = rates(first, ("hbm_to_dram", "dram_to_hbm", "dram_to_store"))
        with plan.engine(config) as second:
            from_store = [logprobs(second, prompt) for prompt in prompts]
            moved |= rates(second, ("store_to_dram",))
        saved = moved["hbm_to_dram"]["bytes"]
        chunks[str(blocks)] = {
            "dram_identical": sum(a == b for a, b in zip(hits, from_dram, strict=True)),
            "store_identical": sum(a == b for a, b in zip(hits, from_store, strict=True)),
            "of": len(prompts),
            "restored": min(moved[name]["bytes"] for name in ("dram_to_hbm", "store_to_dram")) >= 0.95 * saved > 0,
            "moves": moved,
        }
    print("... cost where nothing is gained", flush=True)
    return {
        "bench": "gpu_check",
        "device": "cuda" if plan.cuda else "cpu",
        "identical": all(
            row["restored"] and row["dram_identical"] == row["store_identical"] == row["of"] for row in chunks.values()
        ),
        "blocks_per_chunk": chunks,
        "native_over_none": overhead(plan, draw),
    }


def compute_then_hit(running: Engine, prompts: Sequence[Tokens]) -> list[tuple[float, ...]]:
    """Log-probabilities after a hit in HBM, right behind the computing of each prompt."""
    hits = []
    for prompt in prompts:
        running.complete(prompt)
        hits.append(logprobs(running, prompt))
    return hits


def logprobs(running: Engine, prompt: Tokens) -> tuple[float, ...]:
    return running.complete(prompt, tokens=ANSWER_TOKENS, logprobs=True).logprobs


def rates(running: Engine, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Bytes moved so far, and at how many a second while moving."""
    running.complete([8], tokens=2)  # the connector's numbers reach the page with the next step's
    found = {}
    for name in names:
        moved, took, labels = MOVES[name]
        nbytes, seconds = running.metric(moved, **labels), running.metric(took, **labels)
        found[name] = {"bytes": nbytes, "gb_per_second": round(nbytes / seconds / 1e9, 3) if seconds else 0.0}
    return found


def overhead(plan: Plan, draw: random.Random) -> dict[str, float]:
    """Median, least and greatest ratio of tokens a second, eager offloading over none."""
    with plan.engine(None) as none, plan.engine(transfer_config(plan.dram_bytes)) as native:
        for running in (none, native):
            tokens_a_second(running, [new_prompt(draw, PROMPT_TOKENS)])
        ratios = []
        for number in range(plan.rounds):
            requests = [new_prompt(draw, 500) for _ in range(64 if plan.cuda else 8)]
            order = (none, native) if number % 2 else (native, none)
            rate = {id(running): tokens_a_second(running, requests) for running in order}
            ratios.append(rate[id(native)] / rate[id(none)])
    return {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios), "rounds": plan.rounds}


def tokens_a_second(running: Engine, requests: Sequence[Tokens]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: running.complete(prompt, tokens=16), requests))
    return sum(len(prompt) + 16 for prompt in requests) / (time.perf_counter() - started)


def new_prompt(draw: random.Random, tokens: int) -> Tokens:
    return [draw.randrange(7, 4096) for _ in range(tokens)]


def await_values(store: Store, wanted: int) -> None:
    give_up = time.monotonic() + SETTLE_SECONDS
    while store.values() < wanted:
        if time.monotonic() > give_up:
            raise SystemExit(f"waited {SETTLE_SECONDS:.0f} s in vain for the store to take {wanted} chunks")
        time.sleep(0.2)


def report(found: dict[str, Any]) -> None:
    for blocks, row in found["blocks_per_chunk"].items():
        speeds = ", ".join(f"{name} {move['gb_per_second']:.2f} GB/s" for name, move in row["moves"].items())
        print(
            f"chunks of {blocks} blocks: {row['dram_identical']} of {row['of']} prompts bit-identical from DRAM, "
            f"{row['store_identical']} from the store; {speeds}"
        )
    cost = found["native_over_none"]
    print(f"throughput native over none: {cost['median']:.3f} ({cost['least']:.3f} to {cost['greatest']:.3f})")
    print("restored KV is " + ("right" if found["identical"] else "WRONG, or was not restored at all"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
