"""`kvhearth simulate` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvhearth.cli.main import run

TRACE = "\n".join(
    json.dumps(
        {"timestamp": 400 * i, "input_length": 1200, "output_length": 20, "hash_ids": [i % 3, 10 + i % 5, 20 + i]}
    )
    for i in range(30)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE + "\n")
    return path


def test_a_trace_is_played_on_the_default_deployment(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--trace", str(trace), "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["workload"]["requests"] == 30
    assert page["measured"] == {}
    assert set(page["predicted"]) == {"none", "native", "shared"}
    assert sum(page["predicted"]["none"]["prompt_tokens_by_source"].values()) == 30 * 1200
    assert page["verdict"]["mode"] == "none"


def test_a_stack_file_is_simulated_with_the_modes_it_can_have(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("pools:\n  - {model: Llama-3.1-8B, replicas: 2, num_gpu_blocks_override: 400}\n")
    out = tmp_path / "report"
    assert run(["simulate", "--stack", str(stack), "--trace", str(trace), "--requests", "9", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "9 requests" in printed
    assert "native" in printed
    assert "shared" not in printed
    assert "Verdict: none" in printed
    assert sorted(path.name for path in out.iterdir()) == ["simulate.csv", "simulate.json", "simulate.png"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--workload", "nonsense"], "--workload: unknown workload 'nonsense'; use one of multi-tenant"),
        (["--requests", "5"], "--requests: given without --trace; add --trace FILE"),
        (["--workload", "rag", "--trace", "x"], "--workload: 'rag' together with --trace; give one of the two"),
        (["--trace", "/nowhere/t.jsonl"], "/nowhere/t.jsonl: cannot read the trace"),
        (["--seed", "-1"], "--seed"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "demo"])
def test_wrong_input_is_one_line_and_exit_code_2(
    verb: str, arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([verb, *arguments]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1


def test_a_stack_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--stack", "/nowhere/s.yaml"]) == 2
    assert "/nowhere/s.yaml" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_said(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert run(["simulate", "--trace", str(trace), "--out", str(blocked)]) == 2
    assert "cannot write the report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pool", "line"),
    [
        (
            "engine: vllm, offload: {mode: lmcache}",
            "offload.mode: 'lmcache' is run, not modelled; simulate mode native",
        ),
        (
            "engine: vllm, block_size: 32, vllm: {device: cpu}",
            "vllm.device: engines on a CPU are not modelled; measure",
        ),
    ],
)
def test_what_has_no_model_is_refused(
    pool: str, line: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text(f"pools: [{{model: Llama-3.1-8B, {pool}}}]")
    assert run(["simulate", "--stack", str(stack), "--trace", str(trace)]) == 2
    assert capsys.readouterr().err.startswith(f"kvhearth: error: {stack}: pools[0].{line}")


def test_real_engines_on_a_gpu_are_simulated_by_the_catalog(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("pools: [{model: meta-llama/Llama-3.1-8B-Instruct, engine: vllm, gpu: H100}]")
    assert run(["simulate", "--stack", str(stack), "--trace", str(trace), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["predicted"]) == {"none", "native"}
