"""The demo on real vLLM engines: one workload three times, without offloading, to DRAM, and to the store, measured.

Nothing is predicted: the cost model knows GPUs, and these engines run on this machine's CPU with a model of 23 M
parameters. Their times say what offloading saves *here*; what they show is that the real engine restores what it lost.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import aiohttp

from kvhearth.control.local import LocalStack
from kvhearth.cost.verdict import ORDER, Verdict, choose
from kvhearth.errors import UserError
from kvhearth.metrics import Metric, parse_exposition
from kvhearth.metrics import connector as connector_metrics
from kvhearth.metrics import vllm as vllm_metrics
from kvhearth.planner.load import LoadConfig, play
from kvhearth.planner.outcome import Served, summarise
from kvhearth.planner.workload import Segment, Slo, Turn, User, Workload
from kvhearth.stack import Offload, Pool, Router, Stack, Store, Vllm

ENGINES = 2
_BLOCK_SIZE = 32
_HBM_BLOCKS = 160
_MAX_MODEL_LEN = 4096
_DRAM_BYTES = 96 << 20
_LOOKUP_SECONDS = 1.0
"""Two engines that compute on all cores keep the store's answer, and who waits for it, from running at once."""
_STORE_BYTES = 1 << 30
_TINY = "kvhearth.connector.tiny_models"
_MAKE_SECONDS = 120.0
_REQUEST_SECONDS = 300.0
_PAGE_SECONDS = 30.0

_TENANTS, _USERS, _TURNS = 2, 8, 4
_SYSTEM_WORDS, _DOCUMENT_WORDS, _QUESTION_WORDS, _ANSWER_TOKENS = 150, 250, 60, 8
_THINK_SECONDS, _RAMP_SECONDS = 1.0, 5.0
_SLO = Slo(ttft_seconds=2.0, tpot_seconds=0.2)


class Counts(NamedTuple):
    """What the engines' own metrics say of one run, all engines together.

    Prompt tokens by where their KV came from, and KV bytes: out of HBM (save) and into it (load), from the store (get)
    and to it (put).
    """

    preemptions: int
    hbm_tokens: int
    dram_tokens: int
    store_tokens: int
    compute_tokens: int
    load_bytes: int
    save_bytes: int
    get_bytes: int
    put_bytes: int


class ModeRun(NamedTuple):
    """One mode: what the clients saw, and what the engines counted. Times in seconds, throughput in tokens a second."""

    requests: int
    errors: int
    throughput_tokens_per_second: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    seconds: float
    counts: Counts
    first_error: str | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Told how the demo gets on: a mode's engines start, they are ready, a request was served."""

    on_mode: Callable[[str], None] = lambda mode: None
    on_ready: Callable[[str], None] = lambda mode: None
    on_served: Callable[[Served], None] = lambda served: None


def make_model(python: str, folder: Path) -> Path:
    """Make the demo's model (random weights, a tokenizer trained on the spot) with that interpreter, unless it is made.

    Raises:
        UserError: the interpreter cannot.
    """
    try:
        done = subprocess.run(
            [python, "-m", _TINY, "--kind", "llama", "--out", str(folder), "--seed", "0"],
            capture_output=True,
            text=True,
            timeout=_MAKE_SECONDS,
            check=False,
        )
        failed, said = done.returncode != 0, (done.stderr.strip().splitlines() or ["no output"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, said = True, str(error)
    if failed:
        raise UserError(
            f"{python} cannot make the demo's model: {said}",
            where="--python",
            remedy="give the interpreter of an environment with vLLM and kvhearth (`make test-vllm` makes .venv-vllm)",
        )
    return folder.absolute()


def stack_of_mode(mode: str, python: str, model: Path) -> Stack:
    """Two engines with HBM for some 5,000 tokens of KV each, DRAM for 6,000, and a store for 60,000."""
    offload: dict[str, object] = {"mode": mode, "blocks_per_chunk": 2}
    if mode != "none":
        offload["dram_size"] = _DRAM_BYTES
    if mode == "shared":
        offload["lookup_timeout_seconds"] = _LOOKUP_SECONDS
    pool = Pool(
        name="engine",
        engine="vllm",
        model=str(model),
        served_model_name="tiny",
        replicas=ENGINES,
        block_size=_BLOCK_SIZE,
        num_gpu_blocks_override=_HBM_BLOCKS,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        offload=Offload.model_validate(offload),
        vllm=Vllm(
            python=python,
            device="cpu",
            dtype="float32",
            cpu_kvcache_space=1 << 30,
            enforce_eager=True,
            env={"HF_HUB_OFFLINE": "1"},
            extra_args=("--override-generation-config", '{"temperature":0}'),
        ),
    )
    store = Store(size=_STORE_BYTES, listen=None) if mode == "shared" else None
    return Stack(
        name=f"demo-vllm-{mode}", pools=(pool,), store=store, router=Router(listen="127.0.0.1:0", policy="prefix")
    )


def conversations(users: int = _USERS, turns: int = _TURNS) -> Workload:
    """Users of two tenants who each ask about a document of their own; a word of the text is some four tokens here."""
    script = []
    for number in range(users):
        tenant = number % _TENANTS
        opening = (Segment(1 + tenant, _SYSTEM_WORDS), Segment(100 + number, _DOCUMENT_WORDS))
        asked = [
            Turn(
                (*(opening if turn == 0 else ()), Segment(1000 + 100 * number + turn, _QUESTION_WORDS)),
                _ANSWER_TOKENS,
                int(_THINK_SECONDS * 1e9) if turn else 0,
                continues=turn > 0,
            )
            for turn in range(turns)
        ]
        start_ns = int(_RAMP_SECONDS * 1e9 * number / max(1, users))
        script.append(User(f"user-{number}", f"tenant-{tenant}", start_ns, tuple(asked)))
    return Workload("conversations", tuple(script), _SLO, "users come back to documents that HBM could not keep")


def measure_modes(
    workload: Workload, stack_of: Callable[[str], Stack], steps: Steps = Steps(), modes: Iterable[str] = ORDER
) -> dict[str, ModeRun]:
    """Play the workload on a fresh stack of each mode.

    Raises:
        UserError: an environment that does not suit, or engines that do not start, in their own words.
    """
    measured = {}
    for mode in modes:
        steps.on_mode(mode)
        with LocalStack(stack_of(mode)) as running:
            running.wait_ready()
            steps.on_ready(mode)
            measured[mode] = asyncio.run(_play(workload, running, steps))
    return measured


def verdict(measured: Mapping[str, ModeRun]) -> Verdict:
    """By the same rule as everywhere: the least machinery that is not clearly slower."""
    return choose({mode: run.throughput_tokens_per_second for mode, run in measured.items()})


def write_report(workload: Workload, measured: Mapping[str, ModeRun], folder: Path) -> Path:
    """Write ``demo-vllm.json`` and return its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = folder / "demo-vllm.json"
    page = {
        "workload": {"name": workload.name, "note": workload.note, "requests": workload.requests},
        "setup": {
            "engines": ENGINES,
            "hbm_kv_tokens_per_engine": (_HBM_BLOCKS - 1) * _BLOCK_SIZE,
            "dram_bytes_per_engine": _DRAM_BYTES,
            "store_bytes": _STORE_BYTES,
            "slo": asdict(workload.slo),
        },
        "measured": {mode: {**run._asdict(), "counts": run.counts._asdict()} for mode, run in measured.items()},
        "verdict": verdict(measured)._asdict(),
    }
    path.write_text(json.dumps(page, indent=2) + "\n", encoding="utf-8")
    return path


async def _play(workload: Workload, running: LocalStack, steps: Steps) -> ModeRun:
    urls = list(running.engine_urls.values())
    timeout = aiohttp.ClientTimeout(total=_PAGE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for url in urls:  # the first request that an engine ever has is slow in ways that later ones are not
            body = {"model": "tiny", "prompt": "warm up", "max_tokens": 2}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
        before = [await _counts(session, url) for url in urls]
        config = LoadConfig(running.router_url, "tiny", request_timeout_seconds=_REQUEST_SECONDS)
        run = await play(workload, config, steps.on_served)
        after = [await _counts(session, url) for url in urls]
    seen = summarise(run.served, [], workload.slo)
    return ModeRun(
        requests=seen.requests,
        errors=seen.errors,
        throughput_tokens_per_second=seen.throughput_tokens_per_second,
        ttft_p50_seconds=seen.ttft_p50_seconds,
        ttft_p99_seconds=seen.ttft_p99_seconds,
        seconds=seen.makespan_seconds,
        counts=_difference(after, before),
        first_error=next((served.error for served in run.served if served.error is not None), None),
    )


def _difference(after: Iterable[Counts], before: Iterable[Counts]) -> Counts:
    return Counts(*(sum(a) - sum(b) for a, b in zip(zip(*after, strict=True), zip(*before, strict=True), strict=True)))


async def _counts(session: aiohttp.ClientSession, url: str) -> Counts:
    async with session.get(f"{url}/metrics") as answer:
        return counts_of(await answer.text())


def counts_of(page: str) -> Counts:
    """What a real engine's metrics page says; what it does not show counts 0."""
    families = parse_exposition(page)

    def total(metric: Metric, **labels: str) -> int:
        samples = families.get(metric.exposed_name, {})
        return int(sum(value for name, value in samples.items() if labels.items() <= dict(name).items()))

    cached = vllm_metrics.PROMPT_TOKENS_CACHED_BY_SOURCE
    return Counts(
        preemptions=total(vllm_metrics.NUM_PREEMPTIONS),
        hbm_tokens=total(cached, source="device"),
        dram_tokens=total(cached, source="host"),
        store_tokens=total(cached, source="external_unspecified"),
        compute_tokens=total(vllm_metrics.PROMPT_TOKENS_BY_SOURCE, source="local_compute"),
        load_bytes=total(vllm_metrics.KV_OFFLOAD_LOAD_BYTES),
        save_bytes=total(vllm_metrics.KV_OFFLOAD_STORE_BYTES),
        get_bytes=total(connector_metrics.GET_BYTES),
        put_bytes=total(connector_metrics.PUT_BYTES),
    )
