"""The demo: one workload three times, without offloading, to DRAM, and to the store, measured and predicted.

Measurement and prediction share the engine model, so their agreement checks the plumbing, not the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvhearth.control.measure import Measured, Watch, measure
from kvhearth.cost import CostModel
from kvhearth.cost.verdict import ORDER, choose
from kvhearth.planner.breakeven import Curve
from kvhearth.planner.cluster import Simulated
from kvhearth.planner.outcome import Served
from kvhearth.planner.report import Comparison
from kvhearth.planner.workload import Workload
from kvhearth.stack import DEFAULT_GPU_MEMORY_UTILIZATION, Emulator, Offload, Pool, Router, Stack, Store

MODES = ORDER
SPARE_BLOCKS = 64
"""HBM blocks beyond the longest request, so that it never has the engine to itself."""

_MODEL, _GPU, _ENGINES, _BLOCK_SIZE = "llama-3.1-8b", "h100-sxm", 4, 16
_STREAM_INTERVAL = 16
_LAG_SHARE = 0.03
_CPU_SECONDS_A_REQUEST, _CPU_SECONDS_A_TOKEN, _SIMULATION_CPU_FACTOR = 0.010, 4e-6, 2.5
"""What the stack and its clients use of a server's core: a request, each token of its prompt, and the steps in terms of
what simulating them takes. Wrong figures only make the first time scale too slow or too fast."""
_CPU_SHARE = 0.6


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the demo runs on: 4 emulated H100 with Llama-3.1-8B, and little HBM for KV.

    Args:
        hbm_blocks: KV blocks of 16 tokens in each engine's HBM.
        dram_bytes: DRAM tier of each engine, in bytes of KV.
        store_kv_bytes: the store, in bytes of KV.
        store_bytes_scale: one real byte in the store for so many of KV.
        blocks_per_chunk: blocks moved and stored as one.
        policy: routing policy.
    """

    hbm_blocks: int = 1536
    dram_bytes: int = 5 << 30
    store_kv_bytes: int = 512 << 30
    store_bytes_scale: int = 2048
    blocks_per_chunk: int = 4
    policy: str = "prefix"

    def stack(self, mode: str, time_scale: float = 1.0) -> Stack:
        """The Stack of one mode."""
        return Stack(
            name=f"demo-{mode}",
            pools=(
                Pool(
                    name="engine",
                    model=_MODEL,
                    gpu=_GPU,
                    replicas=_ENGINES,
                    block_size=_BLOCK_SIZE,
                    num_gpu_blocks_override=self.hbm_blocks + 1,  # vLLM keeps one block empty
                    offload=Offload.model_validate(
                        {"mode": mode, "dram_size": self.dram_bytes, "blocks_per_chunk": self.blocks_per_chunk}
                    ),
                    emulator=Emulator(
                        time_scale=time_scale,
                        stream_interval=_STREAM_INTERVAL,
                        store_bytes_scale=self.store_bytes_scale,
                    ),
                ),
            ),
            store=Store(size=self.store_kv_bytes // self.store_bytes_scale, listen=None) if mode == "shared" else None,
            router=Router.model_validate({"listen": "127.0.0.1:0", "policy": self.policy}),
        )

    def for_workload(self, workload: Workload) -> Scenario:
        """The same, with enough HBM for the workload's longest request."""
        needed = -(-workload.longest_tokens // _BLOCK_SIZE) + SPARE_BLOCKS
        if needed <= self.hbm_blocks:
            return self
        return replace(self, hbm_blocks=needed)

    @staticmethod
    def most_tokens() -> int:
        """Prompt plus output of the longest request that the GPU can hold beside the model's weights."""
        return CostModel(_MODEL, _GPU).hbm_kv_tokens(DEFAULT_GPU_MEMORY_UTILIZATION) - (SPARE_BLOCKS + 1) * _BLOCK_SIZE

    def describe(self) -> dict[str, object]:
        """Plain values for the report."""
        return {
            "engines": _ENGINES,
            "model": _MODEL,
            "gpu": _GPU,
            "hbm_kv_tokens_per_engine": self.hbm_blocks * _BLOCK_SIZE,
            "dram_bytes_per_engine": self.dram_bytes,
            "store_kv_bytes": self.store_kv_bytes,
            "blocks_per_chunk": self.blocks_per_chunk,
            "store_bytes_scale": self.store_bytes_scale,
            "policy": self.policy,
        }


@dataclass(frozen=True, slots=True)
class Steps:
    """Told how the measurements get on: a mode begins, a request was served, a run begins again more slowly."""

    on_mode: Callable[[str], None] = lambda mode: None
    on_served: Callable[[Served], None] = lambda served: None
    on_restart: Callable[[float, float], None] = lambda time_scale, lag_seconds: None


def measure_modes(
    workload: Workload,
    scenario: Scenario,
    predicted: dict[str, Simulated],
    *,
    time_scale: float | None = None,
    target_seconds: float = 15.0,
    steps: Steps = Steps(),
) -> dict[str, Measured]:
    """Measure every mode, each on a fresh stack.

    Args:
        predicted: the simulator's runs; they set the lag that figures can bear and the first time scale.
        time_scale: first time scale; None = chosen so that a mode takes about ``target_seconds``, unless that would ask
            more of this machine's cores than they have.

    Raises:
        UserError: see `measure.measure`.
    """
    scale = time_scale or first_time_scale(workload, predicted, target_seconds)
    measured = {}
    for mode in MODES:
        steps.on_mode(mode)
        measured[mode] = measure(
            partial(scenario.stack, mode),
            workload,
            time_scale=scale,
            lag_limit_seconds=lag_limit_seconds(predicted[mode]),
            watch=Watch(steps.on_served, steps.on_restart),
        )
        scale = min(scale, measured[mode].time_scale)  # what one mode could not keep up with, the next need not try
    return measured


def first_time_scale(workload: Workload, predicted: dict[str, Simulated], target_seconds: float) -> float:
    """Emulated seconds a wall second: the longest mode in ``target_seconds``, or as fast as the cores allow."""
    longest = max(run.outcome.makespan_seconds for run in predicted.values())
    steps_seconds = max(run.cpu_seconds for run in predicted.values()) * _SIMULATION_CPU_FACTOR
    tokens = max(sum(served.prompt_tokens for served in run.served) for run in predicted.values())
    cpu_seconds = steps_seconds + workload.requests * _CPU_SECONDS_A_REQUEST + tokens * _CPU_SECONDS_A_TOKEN
    return longest / max(target_seconds, cpu_seconds / (_CPU_SHARE * (os.cpu_count() or 1)))


def lag_limit_seconds(predicted: Simulated) -> float:
    """Mean lag that bends throughput by three percent at most: that share of the mean time that a request takes."""
    return _LAG_SHARE * float(np.mean([(served.finished_ns - served.due_ns) / 1e9 for served in predicted.served]))


def compare(
    workload: Workload,
    setup: dict[str, object],
    measured: dict[str, Measured],
    predicted: dict[str, Simulated],
    curve: Curve | None,
) -> Comparison:
    """Lay both sides beside each other; the verdict rests on what was measured (predicted, if nothing was)."""
    shown = {mode: run.outcome for mode, run in (measured or predicted).items()}
    throughput = {mode: outcome.throughput_tokens_per_second for mode, outcome in shown.items()}
    return Comparison(
        workload={
            "name": workload.name,
            "note": workload.note,
            "requests": workload.requests,
            "users": len(workload.users),
            "slo": {"ttft_seconds": workload.slo.ttft_seconds, "tpot_seconds": workload.slo.tpot_seconds},
        },
        setup={
            **setup,
            "time_scale": {mode: run.time_scale for mode, run in measured.items()},
            "lag_seconds": {mode: run.lag_seconds for mode, run in measured.items()},
        },
        measured={mode: run.outcome for mode, run in measured.items()},
        predicted={mode: run.outcome for mode, run in predicted.items()},
        verdict=choose(throughput),
        curve=curve,
    )
