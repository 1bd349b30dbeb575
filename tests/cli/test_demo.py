"""What `kvhearth demo` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.cli.main import run


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--engine", "vllm", "--workload", "rag"], "--workload: rag with --engine vllm; leave it out"),
        (["--engine", "vllm", "--time-scale", "2"], "--time-scale: 2.0 with --engine vllm; leave it out"),
        (["--python", "python3"], "--python: 'python3' without --engine vllm; add it, or leave this out"),
        (["--engine", "vllm", "--python", "/none"], "--python: /none cannot make the demo's model: "),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    args: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", *args, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"kvhearth: error: {line}")


def test_an_unknown_engine_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--engine", "sglang"]) == 2
    assert "sglang" in capsys.readouterr().err
