"""From a pool to the exact command of one real vLLM engine, per offload mode. Starts nothing and chooses no address."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvhearth.stack import Pool
from kvhearth.stack.fields import parse_address

CONNECTOR_PACKAGE = "kvhearth.connector"
SHUTDOWN_SECONDS = 10
"""For requests in flight when vLLM is told to end. With 0 (vLLM's default) it may leave its DRAM tier in /dev/shm."""

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """Where one engine listens and finds the store.

    Attributes:
        listen: ``host:port`` of its HTTP API.
        store: ``host:port``, ``unix:/path`` or a ring (mode shared).
        events: ZeroMQ endpoint of KV events, one that vLLM binds (``ipc://`` or ``tcp://*:``; it connects to others);
            None = no events.
        replay: ``host:port`` of their replay.
        snapshot: ``host:port`` where the connector tells what the engine holds; None = nowhere.
        copies: nodes of a ring of stores that keep each chunk.
    """

    listen: str
    store: str | None = None
    events: str | None = None
    replay: str | None = None
    snapshot: str | None = None
    copies: int = 1


class Command(NamedTuple):
    """A program with its arguments, and the variables it needs on top of the environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


def vllm_command(pool: Pool, at: EngineAddresses) -> Command:
    """The command of one engine of a pool with ``engine: vllm``.

    The store's password is no part of it: the connector reads ``KVHEARTH_STORE_PASSWORD`` from the environment.
    """
    return Command((*_program(pool), *_flags(pool, at), *pool.vllm.extra_args), _variables(pool))


def shell_command(command: Command) -> str:
    """The command for a POSIX shell: variables in front, then one flag a line."""
    lines: list[list[str]] = [[]]
    for word in command.argv:
        if word.startswith("--") or (word.startswith("-") and len(lines) > 1):
            lines.append([" "])
        lines[-1].append(shlex.quote(word))
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    return " \\\n".join([*variables, *(" ".join(line) for line in lines)])


def kv_transfer_config(pool: Pool, at: EngineAddresses) -> dict[str, Any] | None:
    """vLLM's ``--kv-transfer-config`` for the pool's offload mode; None for mode none."""
    offload = pool.offload
    if offload.mode == "none":
        return None
    if offload.mode == "lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    extra: dict[str, Any] = {
        "spec_name": "HearthOffloadingSpec",
        "spec_module_path": CONNECTOR_PACKAGE,
        "cpu_bytes_to_use": offload.dram_size,
        "blocks_per_chunk": offload.blocks_per_chunk,
        "dram_admission": offload.dram_admission,
        "self_describing_kv_events": True,
    }
    if at.snapshot is not None:
        extra["snapshot_listen"] = at.snapshot
    if offload.mode == "shared":
        tier: dict[str, Any] = {
            "type": "StoreTier",
            "module_path": CONNECTOR_PACKAGE,
            "address": at.store,
            "pool": pool.name,
            "store_admission": offload.store_admission,
            "lookup_timeout_seconds": offload.lookup_timeout_seconds,
        }
        extra["secondary_tiers"] = [tier | ({"copies": at.copies} if at.copies > 1 else {})]
    return {
        "kv_connector": "HearthConnector",
        "kv_connector_module_path": CONNECTOR_PACKAGE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _program(pool: Pool) -> tuple[str, ...]:
    """Wheels for the CPU have no working ``vllm`` script (their metadata has another name), so a chosen interpreter
    runs the server's module."""
    if pool.vllm.python is None:
        return ("vllm", "serve", pool.model)
    return (pool.vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", pool.model)


def _flags(pool: Pool, at: EngineAddresses) -> Iterator[str]:
    host, port = parse_address(at.listen)
    values: dict[str, object] = {
        "--served-model-name": pool.served_model_name or pool.model,
        "--host": host,
        "--port": port,
        "--tensor-parallel-size": pool.tensor_parallel_size,
        "--block-size": pool.block_size,
        "--num-gpu-blocks-override": pool.num_gpu_blocks_override,
        "--gpu-memory-utilization": pool.gpu_memory_utilization,
        "--max-num-seqs": pool.max_num_seqs,
        "--max-num-batched-tokens": pool.max_num_batched_tokens,
        "--max-model-len": pool.max_model_len,
        "--dtype": pool.vllm.dtype,
        "--seed": pool.vllm.seed,
        "--prefix-caching-hash-algo": pool.vllm.hash_algo,
        "--shutdown-timeout": SHUTDOWN_SECONDS,
        "--kv-transfer-config": _json(kv_transfer_config(pool, at)),
        "--kv-events-config": _json(_events(at)),
    }
    for flag, value in values.items():
        if value is not None:
            yield from (flag, str(value))
    yield from ("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models")  # asked every second
    yield "--enable-prefix-caching"
    yield "--enable-prompt-tokens-details"  # usage then tells how much of a prompt was cached
    if pool.vllm.enforce_eager:
        yield "--enforce-eager"


def _events(at: EngineAddresses) -> dict[str, Any] | None:
    if at.events is None:
        return None
    found = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": at.events}
    return found | ({"replay_endpoint": f"tcp://{at.replay}"} if at.replay else {})


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value, separators=(",", ":"))


def _variables(pool: Pool) -> dict[str, str]:
    """Engines share KV only with equal hashes, which take their seed from PYTHONHASHSEED."""
    found = {"PYTHONHASHSEED": "0"}
    if pool.vllm.device != "cuda":
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # two engines would else be bound to the same cores
    if pool.vllm.cpu_kvcache_space is not None:
        found["VLLM_CPU_KVCACHE_SPACE"] = str(pool.vllm.cpu_kvcache_space // _GIB)
    if pool.offload.mode == "lmcache":
        found |= _lmcache(pool)
    return found | pool.vllm.env


def _lmcache(pool: Pool) -> dict[str, str]:
    """LMCache's own settings (docs.lmcache.ai, "Configuring LMCache"): sizes in GiB for each rank, chunks in tokens."""
    rank_gib = pool.offload.dram_size / pool.tensor_parallel_size / _GIB
    return {
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{rank_gib:.6g}",
        "LMCACHE_CHUNK_SIZE": str(pool.block_size * pool.offload.blocks_per_chunk),
        "LMCACHE_TRACK_USAGE": "false",
    }
