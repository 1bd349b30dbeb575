"""What offloading does to real vLLM engines on this machine's CPUs:  python bench/offloading.py [--quick] [--python P]

A random 23 M-parameter Llama, a KV cache of 160 blocks of 32 tokens, and a store of our own as child processes:

* time to first token of a 3,000-token prompt: computed, from HBM, from DRAM, from the store over TCP and in shared
  memory (without --quick: over a unix socket too). Four prompts take turns, so that each has left HBM (and, for the
  store, the engine's DRAM) when it comes again;
* what the connector costs with lazy admission when nothing needs to be offloaded: CPU of its threads and of its hooks
  in the scheduler over the engine's CPU, and bytes moved;
* a run that preempts: what came back from DRAM instead of being computed again;
* without --quick: throughput of modes none, native and shared in turn, as ratios to none of the same round, with the
  95 % interval of a bootstrap over the rounds.

Needs vLLM 0.32: `tests/vllm/install.sh` makes the environment. Takes up to 6 minutes with --quick, 15 without. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from support.engine import Engine, end_children_on_sigterm, engine, tiny_llama, transfer_config, vllm_python
from support.store import Store, store_server

BLOCK_TOKENS = 32
HBM_BLOCKS = 160
PROMPT_TOKENS = 3000
PROMPTS = 4
KV_BYTES_A_TOKEN = 16 * 1024  # 8 layers, keys and values, 4 heads of 64 float32
PROMPT_CHUNKS = (PROMPT_TOKENS - 1) // BLOCK_TOKENS
CHUNK_BYTES = BLOCK_TOKENS * KV_BYTES_A_TOKEN
LARGE_DRAM = 512 * CHUNK_BYTES
# Two prompts and some, for loads from the store take at most half. Of four in turn, the next is then in the store only.
SMALL_DRAM = 208 * CHUNK_BYTES
STORE_BYTES = 1536 * CHUNK_BYTES
SETTLE_SECONDS = 60.0

ROOMY_BLOCKS = 1024

Tokens = list[int]


class Prompts:
    """Random prompts that share nothing, the same at each run."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def new(self, tokens: int) -> Tokens:
        """A prompt of so many token ids, none of them special."""
        return [self._random.randrange(7, 4096) for _ in range(tokens)]


class Ttft(NamedTuple):
    """Times to first token in one engine, in seconds, and the share of the restorable bytes that was restored."""

    cold: list[float]
    hbm: list[float]
    restored: list[float]
    restored_share: float


class Bench:
    """What every scenario needs: how to start an engine, and fresh prompts."""

    def __init__(self, python: str, model: Path, folder: Path, *, quick: bool) -> None:
        self.python, self.model, self.folder, self.quick = python, model, folder, quick
        self.prompts = Prompts()

    @contextlib.contextmanager
    def engine(self, config: dict[str, Any] | None = None, *, blocks: int = HBM_BLOCKS) -> Iterator[Engine]:
        """A warmed-up engine."""
        flags = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks), "--max-model-len", "4096"]
        with engine(self.python, self.model, self.folder, config, flags=flags) as running:
            for tokens in (PROMPT_TOKENS, 64):
                running.complete(self.prompts.new(tokens), tokens=4)
            yield running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no throughput: up to 6 minutes")
    parser.add_argument("--python", help="interpreter that has vLLM (default: .venv-vllm of the repository)")
    given = parser.parse_args()
    end_children_on_sigterm()
    python = vllm_python(given.python)
    if python is None:
        print("skipped: no vLLM here; make its environment with tests/vllm/install.sh, or name one with --python")
        print(json.dumps({"bench": "offloading", "skipped": "no vLLM"}))
        return
    with tempfile.TemporaryDirectory(prefix="kvhearth-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        store = stack.enter_context(store_server(folder, STORE_BYTES))
        report(measure(Bench(python, tiny_llama(python, folder), folder, quick=given.quick), store))


def measure(bench: Bench, store: Store) -> dict[str, Any]:
    """Every scenario; one engine at a time, but for the throughput of several."""
    rounds = 5 if bench.quick else 10
    prompts, others = ([bench.prompts.new(PROMPT_TOKENS) for _ in range(PROMPTS)] for _ in range(2))
    ttft: dict[str, Ttft] = {}
    say("time to first token, computed, from HBM, and from the store over TCP")
    with bench.engine(transfer_config(SMALL_DRAM, store.tcp)) as running:
        held = store.values()
        cold, hbm = cold_then_hbm(running, prompts)
        settle(lambda: store.values() >= held + PROMPTS * PROMPT_CHUNKS, "the store to take every chunk")
        ttft["store_tcp"] = restored_from_store(running, prompts, (cold, hbm), rounds)
    if not bench.quick:
        say("time to first token from the store over a unix socket")
        with bench.engine(transfer_config(SMALL_DRAM, store.unix, shared_memory=False)) as running:
            ttft["store_unix"] = restored_from_store(running, prompts, (cold, hbm), rounds)
    say("time to first token from the store in shared memory")
    with bench.engine(transfer_config(SMALL_DRAM, store.unix)) as running:
        ttft["store_shm"] = restored_from_store(running, prompts, (cold, hbm), rounds)
    say("time to first token from DRAM, and preemption")
    with bench.engine(transfer_config(LARGE_DRAM, store.unix)) as running:
        ttft["dram"] = restored_from_dram(running, others, store, rounds)
        preempted = preemption(bench, running, statistics.median(ttft["dram"].cold) / PROMPT_TOKENS)
    say("cost without pressure, admission lazy")
    with bench.engine(transfer_config(LARGE_DRAM, store.tcp, dram_admission="lazy"), blocks=ROOMY_BLOCKS) as running:
        idle = low_pressure(bench, running, 15.0 if bench.quick else 60.0)
    throughput = None if bench.quick else measure_throughput(bench, store.tcp)
    return figures(ttft, idle, preempted, throughput)


def restored_from_store(
    running: Engine, prompts: Sequence[Tokens], computed: tuple[list[float], list[float]], rounds: int
) -> Ttft:
    """Each in turn, so that each has left HBM (and, with little DRAM, that too) when it comes again."""
    times = Ttft(*computed, *in_turn(running, prompts, rounds, "kvhearth_connector_get_bytes_total"))
    say(described(times))
    return times


def restored_from_dram(running: Engine, prompts: Sequence[Tokens], store: Store, rounds: int) -> Ttft:
    """Prompts that this engine has computed, once they are in DRAM, and in the store too, so that no put goes on."""
    held = store.values()
    cold, hbm = cold_then_hbm(running, prompts)
    settle(lambda: nudged_values(running, store) >= held + PROMPTS * PROMPT_CHUNKS, "the store to take every chunk")
    times = Ttft(cold, hbm, *in_turn(running, prompts, rounds, "vllm:kv_offload_load_bytes_total"))
    say(described(times))
    return times


def cold_then_hbm(running: Engine, prompts: Sequence[Tokens]) -> tuple[list[float], list[float]]:
    cold, hbm = [], []
    for prompt in prompts:
        cold.append(running.complete(prompt).first_token_seconds)
        hbm += [running.complete(prompt).first_token_seconds for _ in range(3)]
    return cold, hbm


def in_turn(running: Engine, prompts: Sequence[Tokens], rounds: int, moved: str) -> tuple[list[float], float]:
    """Ask for each prompt in its turn; seconds to the first token, and what share of their bytes ``moved`` counted."""
    before = nudged(running, moved)
    seconds = [running.complete(prompt).first_token_seconds for _ in range(rounds) for prompt in prompts]
    share = (nudged(running, moved) - before) / (len(seconds) * PROMPT_CHUNKS * CHUNK_BYTES)
    if share < 0.5:
        raise SystemExit(f"{moved} says that only {share:.0%} of the prompts came back: these times would mislead")
    return seconds, share


def preemption(bench: Bench, running: Engine, cold_seconds_a_token: float) -> dict[str, float]:
    """Eight requests that need 200 blocks where there are 160. Seconds saved: what was loaded, computed again at a cold
    prompt's pace, less the time that the loads took."""
    names = ("vllm:num_preemptions_total", "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total")
    before = [running.metric(name) for name in names]
    prompts = [bench.prompts.new(600) for _ in range(8)]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: running.complete(prompt, tokens=200), prompts))
    seconds = time.perf_counter() - started
    nudged(running, names[0])
    preemptions, loaded, load_seconds = (running.metric(name) - at for name, at in zip(names, before, strict=True))
    saved = loaded / KV_BYTES_A_TOKEN * cold_seconds_a_token - load_seconds
    return {
        "preemptions": preemptions,
        "kv_offload_load_bytes": loaded,
        "load_seconds": load_seconds,
        "seconds_saved": saved,
        "seconds": seconds,
    }


def low_pressure(bench: Bench, running: Engine, seconds: float) -> dict[str, float]:
    """Twenty-four short prompts again and again, all of which fit HBM many times over."""
    prompts = [bench.prompts.new(256) for _ in range(24)]
    moved = (
        "vllm:kv_offload_store_bytes_total",
        "vllm:kv_offload_load_bytes_total",
        "kvhearth_connector_put_bytes_total",
        "kvhearth_connector_get_bytes_total",
    )
    hooks = "kvhearth_connector_scheduler_seconds_total"
    bytes_before = sum(running.metric(name) for name in moved)
    hooks_before, before, end = running.metric(hooks), running.cpu(), time.monotonic() + seconds
    count = 0
    lock = threading.Lock()

    def work(_: int) -> None:
        nonlocal count
        while time.monotonic() < end:
            with lock:
                prompt = prompts[count % len(prompts)]
                count += 1
            running.complete(prompt, tokens=32)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    after = running.cpu()
    engine_seconds = after.engine_seconds - before.engine_seconds
    threads = after.connector_seconds - before.connector_seconds
    hook_seconds = running.metric(hooks) - hooks_before
    return {
        "requests": count,
        "engine_cpu_seconds": engine_seconds,
        "connector_thread_cpu_seconds": threads,
        "connector_threads": after.connector_threads,
        "scheduler_hook_seconds": hook_seconds,
        "cpu_share": (threads + hook_seconds) / engine_seconds,
        "bytes_moved": sum(running.metric(name) for name in moved) - bytes_before,
    }


def measure_throughput(bench: Bench, store: str) -> dict[str, Any]:
    """Three engines at once, one of them busy at a time, so that modes can take turns within a round."""
    say("throughput of none, native and shared in turn")
    configs = {
        "none": None,
        "native": transfer_config(LARGE_DRAM),
        "shared": transfer_config(LARGE_DRAM, store),
    }
    rounds = 7
    found: dict[str, Any] = {"rounds": rounds}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(bench.engine(config)) for name, config in configs.items()}
        for workload in (sessions_beyond_hbm, prompts_that_share_nothing):
            ratios: dict[str, list[float]] = {name: [] for name in engines if name != "none"}
            for number in range(rounds):
                requests = workload(bench.prompts)
                order = list(engines) if number % 2 else list(reversed(engines))
                rates = {name: tokens_a_second(engines[name], requests) for name in order}
                for name, values in ratios.items():
                    values.append(rates[name] / rates["none"])
            found[workload.__name__] = {name: interval(values) for name, values in ratios.items()}
    return found


def sessions_beyond_hbm(prompts: Prompts) -> list[Tokens]:
    """Six sessions of three turns in turn; together they need twice the HBM there is."""
    histories = [prompts.new(1000) for _ in range(6)]
    requests = []
    for _ in range(3):
        for index, history in enumerate(histories):
            requests.append(history)
            histories[index] = history + prompts.new(300)
    return requests


def prompts_that_share_nothing(prompts: Prompts) -> list[Tokens]:
    """Nothing to gain: what offloading costs."""
    return [prompts.new(500) for _ in range(10)]


def tokens_a_second(running: Engine, requests: Sequence[Tokens]) -> float:
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda prompt: running.complete(prompt, tokens=16), requests))
    return sum(len(prompt) + 16 for prompt in requests) / (time.perf_counter() - started)


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Mean, and the 95 % interval of a percentile bootstrap over the rounds."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {"mean": statistics.fmean(ratios), "low": means[100], "high": means[-101]}


def nudged(running: Engine, name: str) -> float:
    """A metric, after a step: the connector's numbers reach the page with the next step's."""
    running.complete([8], tokens=2)
    return running.metric(name)


def nudged_values(running: Engine, store: Store) -> int:
    """What the store holds, after a step of the engine."""
    running.complete([8], tokens=2)
    return store.values()


def settle(check: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + SETTLE_SECONDS
    while not check():
        if time.monotonic() > give_up:
            raise SystemExit(f"waited {SETTLE_SECONDS:.0f} s in vain for {what}")
        time.sleep(0.2)


def figures(
    ttft: dict[str, Ttft], idle: dict[str, float], preempted: dict[str, float], throughput: dict[str, Any] | None
) -> dict[str, Any]:
    def milliseconds(seconds: Sequence[float]) -> float:
        return round(statistics.median(seconds) * 1e3, 1)

    def to_cold(name: str) -> float:
        return round(statistics.median(ttft[name].restored) / statistics.median(ttft[name].cold), 4)

    return {
        "bench": "offloading",
        "ttft_ms": {
            "cold": milliseconds([*ttft["store_tcp"].cold, *ttft["dram"].cold]),
            "hbm": milliseconds([*ttft["store_tcp"].hbm, *ttft["dram"].hbm]),
            **{name: milliseconds(times.restored) for name, times in ttft.items()},
        },
        "restored_share": {name: round(times.restored_share, 3) for name, times in ttft.items()},
        "ratio": {
            "store_vs_cold": to_cold("store_tcp"),
            **{f"{name}_vs_cold": to_cold(name) for name in ttft if name != "store_tcp"},
            "store_shm_vs_dram": round(
                statistics.median(ttft["store_shm"].restored) / statistics.median(ttft["dram"].restored), 3
            ),
            "cpu_share_low_pressure": round(idle["cpu_share"], 5),
        },
        "low_pressure_bytes_moved": idle["bytes_moved"],
        "low_pressure": idle,
        "preemption": preempted,
        "throughput": throughput,
    }


def report(found: dict[str, Any]) -> None:
    ratio, idle, preempted = found["ratio"], found["low_pressure"], found["preemption"]
    print("time to first token, ms, medians:", ", ".join(f"{k} {v}" for k, v in found["ttft_ms"].items()))
    for name, target in (("store_vs_cold", 0.08), ("dram_vs_cold", 0.06)):
        print(f"{name}: {ratio[name]:.3f} of the time to compute it (target: at most {target})")
    print(f"store_shm_vs_dram: {ratio['store_shm_vs_dram']:.2f} of the time from DRAM (target: at most 1.15)")
    print(
        f"without pressure, lazy: {idle['bytes_moved']:.0f} bytes moved (target: 0), "
        f"{ratio['cpu_share_low_pressure']:.2%} of the engine's CPU (target: at most 1 %)"
    )
    if not idle["connector_threads"]:
        print("no thread of the engine is named kvhearth-*: that share is of the scheduler's hooks alone")
    print(
        f"{preempted['preemptions']:.0f} preemptions: {preempted['kv_offload_load_bytes'] / 2**20:.0f} MiB came from "
        f"DRAM, {preempted['seconds_saved']:.1f} s of computing saved in a run of {preempted['seconds']:.1f} s"
    )
    if found["throughput"] is None:
        print("throughput was skipped (--quick)")
    print(json.dumps(found))


def described(times: Ttft) -> str:
    cold, hbm, restored = (statistics.median(seconds) * 1e3 for seconds in times[:3])
    return f"cold {cold:.0f} ms, HBM {hbm:.0f}, restored {restored:.0f} ({times.restored_share:.0%} of the bytes)"


def say(what: str) -> None:
    print(f"... {what}", flush=True)


if __name__ == "__main__":
    main()
