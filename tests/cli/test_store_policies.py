"""`kvhearth store policies` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvhearth.cli.main import run
from kvhearth.store.policies import POLICY_NAMES

TRACE = "\n".join(
    json.dumps(
        {"timestamp": 400 * i, "input_length": 1536, "output_length": 20, "hash_ids": [i % 3, 10 + i % 5, 90 + i]}
    )
    for i in range(30)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE + "\n")
    return path


def test_it_prints_hit_rates_by_policy_and_capacity_beside_the_optimum(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["store", "policies", "--trace", str(trace), "--capacity", "25%", "--capacity", "100%"]) == 0
    printed = capsys.readouterr().out
    for word in (*POLICY_NAMES, "belady", "gap", "points", "25.0%", "100.0%"):
        assert word in printed


def test_json_has_every_run_and_the_gap(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--policy", "lru", "--capacity", "64MiB", "--capacity", "100%", "--chunk-tokens", "512", "--json"]
    assert run(["store", "policies", "--trace", str(trace), *arguments]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["trace"]["lookups"] == 90
    assert page["chunk_bytes"] == 64 << 20
    rows = {(row["policy"], row["capacity_chunks"]): row for row in page["hit_rates"]}
    assert set(rows) == {(p, c) for p in ("lru", "belady") for c in (1, page["trace"]["chunks"])}
    everything = rows["lru", page["trace"]["chunks"]]
    assert everything["hits"] == 90 - page["trace"]["chunks"]
    assert everything["gap_to_belady"] == 0


def test_a_picture_is_written(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "rates.png"
    assert run(["store", "policies", "--trace", str(trace), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_agent_sessions_are_played_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        turns = [{"t": 5.0 * n, "in": 64 * n + 7, "out": 3, "hash_ids": list(range(1, n + 1))} for n in (1, 2, 3)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"block_size": 64, "requests": turns}))
    assert (
        run(["store", "policies", "--trace", str(tmp_path), "--chunk-tokens", "64", "--capacity", "100%", "--json"])
        == 0
    )
    page = json.loads(capsys.readouterr().out)
    assert page["trace"]["lookups"] == 12
    assert page["trace"]["chunks"] == 6  # ids count within a session: nothing is shared between the two


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--policy", "mru"], "--policy: there is no policy 'mru'; use kv-aware"),
        (["--capacity", "0%"], "--capacity: '0%' is no share above 0%"),
        (["--capacity", "1KiB"], "--capacity: 1KiB hold no chunk of 64 MiB; give more"),
        (["--capacity", "much"], "--capacity: 'much' is not a size"),
        (["--token-bytes", "1GiB"], "--token-bytes: a chunk has"),
        (["--plot", "/nowhere/x.png"], "/nowhere/x.png: its folder does not exist"),
        (["--chunk-tokens", "5000"], "no prompt fills a chunk"),
    ],
)
def test_what_cannot_be_done_is_named(
    arguments: list[str], line: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["store", "policies", "--trace", str(trace), *arguments]) == 2
    assert line in capsys.readouterr().err
