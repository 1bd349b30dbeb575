"""From a Stack to command lines: which children a local stack has, with their flags and addresses. Starts nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kvhearth.control.child import START_SECONDS, ChildSpec
from kvhearth.control.vllm_args import EngineAddresses, vllm_command
from kvhearth.stack import DEFAULT_GPU_MEMORY_UTILIZATION, Engine, Stack, Store
from kvhearth.stack.fields import Address, parse_address

STORE, ENGINES, ROUTER = 0, 1, 2
"""Stages: the store serves before engines look for it, engines before the router sends them anything."""

_FAULTED_BYTES_PER_SECOND = 2**29
"""A store takes all its memory before it serves; a slow, busy machine manages this much."""

_NO_KEY_OF_ITS_OWN = {"KVHEARTH_EMULATOR_API_KEY": "", "VLLM_API_KEY": ""}
"""The router asks clients for the key; a second one, from a variable set for another engine, would shut it out."""


@dataclass(frozen=True, slots=True)
class StoreAddresses:
    """Where the store listens: its unix socket's path, ``host:port`` of its metrics and, if any, of its TCP port."""

    socket: str
    metrics: str
    tcp: str | None


class EventAddresses(NamedTuple):
    """Where an engine publishes its KV events (a ZeroMQ endpoint), replays them, and tells what it holds (``host:port``
    both)."""

    events: str
    replay: str
    snapshot: str


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything listens as ``host:port``, all ports chosen; engines by name. ``events`` has those of the engines
    that publish KV events."""

    router: str
    engines: Mapping[str, str]
    store: StoreAddresses | None
    events: Mapping[str, EventAddresses] = field(default_factory=dict)
    store_elsewhere: str | None = None
    """Address of a store or ring that is not a child."""
    copies: int = 1
    """Nodes of that ring that keep each chunk."""

    @property
    def engines_store(self) -> str | None:
        """Where engines find the store, by the nearest way; None without one."""
        return f"unix:{self.store.socket}" if self.store is not None else self.store_elsewhere


def plan(stack: Stack, at: Addresses, devices: Mapping[str, str]) -> list[ChildSpec]:
    """The children of a stack, in the order in which people think of them: store, engines, router.

    Args:
        devices: of the real engines that have GPUs of their own, their ids as CUDA_VISIBLE_DEVICES takes them.
    """
    children = [
        _vllm(engine, at, devices.get(engine.name)) if engine.pool.engine == "vllm" else _emulated(engine, at)
        for engine in stack.engines()
    ]
    children.append(_router(stack, at))
    if stack.store is not None and at.store is not None:
        children.insert(0, _store(stack.store, at.store))
    return children


def publishes_events(stack: Stack, engine: Engine) -> bool:
    """Whether an engine is told to publish KV events."""
    wanted = engine.pool.engine == "vllm" and engine.pool.vllm.kv_events
    return wanted or stack.router.policy == "kv-aware"


def router_url(at: Addresses) -> str:
    """Where this machine reaches the router, also when it listens at every address."""
    host, port = parse_address(at.router)
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return f"http://{Address(anywhere.get(host, host), port)}"


def _store(store: Store, at: StoreAddresses) -> ChildSpec:
    flags = ["--unix", at.socket, "--http-listen", at.metrics, "--capacity", str(store.size)]
    if at.tcp is not None:
        flags += ["--listen", at.tcp]
    patience = START_SECONDS + store.size / _FAULTED_BYTES_PER_SECOND
    if store.config is not None:
        flags += ["--config", store.config]
    argv = _verb("store", "serve", *flags)
    return ChildSpec("store", argv, f"http://{at.metrics}/readyz", STORE, start_seconds=patience)


def _emulated(engine: Engine, at: Addresses) -> ChildSpec:
    pool, listen = engine.pool, at.engines[engine.name]
    flags: dict[str, object] = {
        "--listen": listen,
        "--model": pool.model,
        "--served-model-name": pool.served_model_name or pool.model,
        "--engine-id": engine.name,
        "--gpu": pool.gpu,
        "--tensor-parallel-size": pool.tensor_parallel_size,
        "--block-size": pool.block_size,
        "--max-num-seqs": pool.max_num_seqs,
        "--max-num-batched-tokens": pool.max_num_batched_tokens,
        "--time-scale": pool.emulator.time_scale,
        "--stream-interval": pool.emulator.stream_interval,
        "--offload-mode": pool.offload.mode,
    }
    if pool.offload.mode != "none":
        flags |= {
            "--dram-size": pool.offload.dram_size,
            "--blocks-per-chunk": pool.offload.blocks_per_chunk,
            "--dram-admission": pool.offload.dram_admission,
        }
    if pool.offload.mode == "shared" and at.engines_store is not None:
        flags |= {
            "--store": at.engines_store,
            "--store-link": pool.emulator.store_link,
            "--store-bytes-scale": pool.emulator.store_bytes_scale,
        }
    if (told := at.events.get(engine.name)) is not None:
        events = {"enable_kv_cache_events": True, "endpoint": told.events, "replay_endpoint": f"tcp://{told.replay}"}
        flags["--kv-events-config"] = json.dumps(events)
    if pool.max_model_len is not None:
        flags["--max-model-len"] = pool.max_model_len
    if pool.num_gpu_blocks_override is not None:
        flags["--num-gpu-blocks-override"] = pool.num_gpu_blocks_override
    else:
        flags["--gpu-memory-utilization"] = pool.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    argv = [str(part) for flag in flags.items() for part in flag]
    if "--store" in flags:
        argv.append("--store-may-be-down")  # an engine that is restarted serves on while the store is restarted too
    return ChildSpec(
        engine.name, _verb("emulator", "serve", *argv), f"http://{listen}/health", ENGINES, _NO_KEY_OF_ITS_OWN
    )


def _vllm(engine: Engine, at: Addresses, devices: str | None) -> ChildSpec:
    pool, listen = engine.pool, at.engines[engine.name]
    where = EngineAddresses(listen, store=at.engines_store, copies=at.copies)
    if (events := at.events.get(engine.name)) is not None:
        where = replace(where, events=events.events, replay=events.replay, snapshot=events.snapshot)
    command = vllm_command(pool, where)
    env = {**_NO_KEY_OF_ITS_OWN, **command.env}
    if devices is not None:
        env.setdefault("CUDA_VISIBLE_DEVICES", devices)
    return ChildSpec(
        engine.name,
        command.argv,
        f"http://{listen}/health",
        ENGINES,
        env,
        start_seconds=pool.vllm.start_seconds,
        has_children=True,
    )


def _router(stack: Stack, at: Addresses) -> ChildSpec:
    router = stack.router
    flags = ["--listen", at.router, "--policy", router.policy, "--drain-seconds", str(router.drain_seconds)]
    if router.api_key_file is not None:
        flags += ["--api-key-file", router.api_key_file]
    for name, listen in at.engines.items():
        flags += ["--engine", f"{name}=http://{listen}"]
    if router.policy == "kv-aware":
        has_snapshot = {
            engine.name: engine.pool.engine == "vllm" and engine.pool.offload.mode in ("native", "shared")
            for engine in stack.engines()
        }
        for name, told in at.events.items():
            flags += ["--kv-events", f"{name}={told.events}", "--kv-replay", f"{name}=tcp://{told.replay}"]
            if has_snapshot[name]:
                flags += ["--kv-snapshot", f"{name}={told.snapshot}"]
        if at.engines_store is not None:
            flags += ["--store", at.engines_store]
        models = {pool.model for pool in stack.pools if pool.engine == "vllm"}
        if len(models) == 1 and Path(*models, "tokenizer.json").is_file():
            flags += ["--tokenizer", *models]
    return ChildSpec("router", _verb("router", "serve", *flags), f"{router_url(at)}/health", ROUTER)


def _verb(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "kvhearth", *words)
