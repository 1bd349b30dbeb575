"""The part of a pool that only real vLLM engines read: which vLLM, and what goes to it beyond the pool's own fields."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from kvhearth.stack.fields import Bytes, Section
from kvhearth.stack.versions import VllmVersion, supported_range

HashAlgo = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]
"""vLLM's prefix-caching hash algorithms."""

CPU_BLOCK_MULTIPLE = 32
"""Block sizes of vLLM's CPU backend are multiples of this (its attention kernels)."""

_GIB = 1 << 30

OWN_FLAGS: dict[str, str] = {
    "--model": "model",
    "--served-model-name": "served_model_name",
    "--host": "",
    "--port": "",
    "--uds": "",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--block-size": "block_size",
    "--num-gpu-blocks-override": "num_gpu_blocks_override",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len",
    "--dtype": "vllm.dtype",
    "--seed": "vllm.seed",
    "--enforce-eager": "vllm.enforce_eager",
    "--no-enforce-eager": "vllm.enforce_eager",
    "--prefix-caching-hash-algo": "vllm.hash_algo",
    "--enable-prefix-caching": "",
    "--no-enable-prefix-caching": "",
    "--enable-prompt-tokens-details": "",
    "--no-enable-prompt-tokens-details": "",
    "--disable-access-log-for-endpoints": "",
    "--shutdown-timeout": "",
    "--kv-transfer-config": "offload",
    "--kv-offloading-size": "offload.dram_size",
    "--kv-offloading-backend": "offload.mode",
    "--kv-events-config": "vllm.kv_events",
    "--config": "",
}
"""Flags that follow from the Stack, and the field of the pool that sets each ("" = kvhearth alone)."""

SECRET_FLAGS = {
    "--api-key": "engines listen on loopback; set router.api_key_file",
    "--hf-token": "set HF_TOKEN where kvhearth is run",
}
"""Flags whose values every user of the machine could read, and what to do instead."""

OWN_VARIABLES = ("PYTHONHASHSEED", "VLLM_CPU_KVCACHE_SPACE", "LMCACHE_CHUNK_SIZE", "LMCACHE_MAX_LOCAL_CPU_SIZE")
"""Variables that follow from the Stack."""

_SECRET = re.compile(r"(^|_)(KEY|TOKEN|PASSWORD|SECRET)$")


def _extra_args(args: tuple[str, ...]) -> tuple[str, ...]:
    for arg in args:
        if not arg.startswith("-"):
            continue
        # vLLM reads underscores as dashes, --a.b as a key of the JSON flag --a, and takes unambiguous beginnings.
        name = re.split(r"[=.]", arg, maxsplit=1)[0].replace("_", "-")
        known = (*SECRET_FLAGS, *OWN_FLAGS)
        own = next((flag for flag in known if flag == name or (len(name) > 3 and flag.startswith(name))), None)
        if own in SECRET_FLAGS:
            raise ValueError(f"{own} would show its secret to all users; {SECRET_FLAGS[own]}")
        if own is not None:
            field = OWN_FLAGS[own]
            raise ValueError(
                f"{arg!r}: {own} is set by kvhearth" + (f"; set {field} instead" if field else "; leave it out")
            )
    return args


def _variables(env: dict[str, str]) -> dict[str, str]:
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        if name in OWN_VARIABLES:
            raise ValueError(f"{name} is set by kvhearth; leave it out")
        if _SECRET.search(name):
            raise ValueError(f"{name}: a Stack is no place for secrets; set it where kvhearth is run")
    return env


def _whole_gib(value: int | None) -> int | None:
    if value is not None and (value < _GIB or value % _GIB):
        raise ValueError("want whole GiB, such as 4GiB, for vLLM reads no fractions")
    return value


class Vllm(Section):
    """How a pool's real vLLM engines are run (engine: vllm)."""

    python: str | None = Field(
        default=None,
        min_length=1,
        description="interpreter of the environment that has vLLM (from this file); by default `vllm` of the PATH",
    )
    version: VllmVersion | None = Field(
        default=None, description=f"insist on this minor version; by default any of {supported_range()}"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="what it runs on; auto: what that vLLM was built for"
    )
    dtype: str | None = Field(
        default=None, min_length=1, description="of weights and activations; by default the model's"
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1)
    enforce_eager: bool = Field(default=False, description="no CUDA graphs and no compilation: quicker starts")
    cpu_kvcache_space: Annotated[Bytes | None, AfterValidator(_whole_gib)] = Field(
        default=None, description="KV memory of a CPU engine, in whole GiB; the `HBM` of that engine"
    )
    hash_algo: HashAlgo = Field(default="sha256_cbor", description="of prefix caching; part of every key in the store")
    kv_events: bool = Field(
        default=False, description="publish KV events (ZeroMQ), and what the connector holds to those that come late"
    )
    start_seconds: float = Field(default=600.0, gt=0, le=86_400, description="deadline from start to serving")
    extra_args: Annotated[tuple[str, ...], AfterValidator(_extra_args)] = Field(
        default=(), description="further flags of `vllm serve`, word by word"
    )
    env: Annotated[dict[str, str], AfterValidator(_variables)] = Field(
        default_factory=dict, description="further environment variables; no secrets"
    )

    @field_validator("python")
    @classmethod
    def _from_the_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        """Symbolic links stay: an environment's interpreter is one, and is found by where it lies."""
        directory = (info.context or {}).get("directory")
        if value is None or directory is None or "/" not in value:
            return value
        return os.path.normpath(Path(directory).absolute() / value)
