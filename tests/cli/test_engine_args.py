"""`kvhearth engine-args` as a user runs it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvhearth.cli.main import run

STACK = """
pools:
  - {name: chat, engine: vllm, model: org/chat, replicas: 2, offload: {mode: shared}}
  - {name: code, engine: vllm, model: org/code, vllm: {device: cpu}, block_size: 32}
  - {name: pretend, model: Llama-3.1-8B}
store: {size: 1GiB, listen: "127.0.0.1:7420"}
"""


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return path


def test_each_real_pool_has_a_block_that_a_shell_can_run(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine-args", str(stack)]) == 0
    captured = capsys.readouterr()
    first, second = captured.out.split("\n\n")
    assert first.startswith(
        "# pool chat: vLLM 0.32 (runs in the tests, assumed: set vllm.version), offload mode shared\n"
    )
    assert second.startswith("# pool code: ")
    words = shlex.split(first.replace("\\\n", " "), comments=True)
    assert "vllm serve org/chat" in " ".join(words)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["secondary_tiers"][0]["address"] == "127.0.0.1:7420"
    assert captured.err == ""


def test_one_pool_as_json(stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["engine-args", str(stack), "--pool", "code", "--format", "json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["pool"] == "code"
    assert told["argv"][:3] == ["vllm", "serve", "org/code"]
    assert told["env"]["PYTHONHASHSEED"] == "0"


def test_secrets_of_the_environment_are_not_printed(
    stack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "hunter2")
    for form in ("shell", "json"):
        assert run(["engine-args", str(stack), "--format", form]) == 0
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (('listen: "127.0.0.1:7420"', "unix: null"), "store.listen: the store has no fixed address"),
        (("block_size: 32", "block_size: 16"), "pools[1].block_size: 16: vLLM on a CPU wants a multiple of 32"),
        (("org/chat", "/none"), "pools[0].model: no such directory: /none"),
    ],
)
def test_what_is_missing_is_one_line_and_exit_code_2(
    change: tuple[str, str], line: str, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write_text(STACK.replace(*change))
    assert run(["engine-args", str(stack)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvhearth: error: {stack}: {line}")
    assert captured.err.count("\n") == 1
