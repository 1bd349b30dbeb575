"""The report's three files say the same thing."""

import csv
import json
from pathlib import Path

import pytest

from kvhearth.cost.verdict import choose
from kvhearth.planner.breakeven import Curve, Level
from kvhearth.planner.outcome import Outcome
from kvhearth.planner.report import Comparison, write


def outcome(throughput: float) -> Outcome:
    sources = {"hbm": 10, "dram": 20, "store": 30, "compute": 40}
    return Outcome(5, 0, throughput, 1.0, 0.5, 2.0, 3, 7, 4, 50, sources, 9.0)


def comparison(*, measured: bool = True) -> Comparison:
    sides = {"none": outcome(100.0), "native": outcome(110.0), "shared": outcome(130.0)}
    curve = Curve([Level(2, 0.3, {"native": 0.0, "shared": 0.1})], {"native": None, "shared": 0.3}, {})
    verdict = choose({mode: side.throughput_tokens_per_second for mode, side in sides.items()})
    return Comparison({"name": "w"}, {}, sides if measured else {}, sides, verdict, curve)


def test_json_has_both_sides_by_mode(tmp_path: Path) -> None:
    path = write(comparison(), tmp_path / "deep" / "report", "demo")[0]
    page = json.loads(path.read_text())
    assert set(page["measured"]) == set(page["predicted"]) == {"none", "native", "shared"}
    assert page["measured"]["shared"]["prompt_tokens_by_source"] == {"hbm": 10, "dram": 20, "store": 30, "compute": 40}
    assert page["verdict"]["mode"] == "shared"
    assert page["break_even_hbm_usage"] == {"native": None, "shared": 0.3}
    wanted = "requests errors throughput_tokens_per_second goodput_requests_per_second ttft_p50_seconds"
    wanted += " ttft_p99_seconds preemptions reprefill_tokens reprefills_avoided prompt_tokens_by_source"
    assert set(wanted.split()) <= set(page["measured"]["none"])


@pytest.mark.parametrize(("measured", "rows"), [(True, 6), (False, 3)])
def test_csv_has_a_row_a_mode_and_side(tmp_path: Path, measured: bool, rows: int) -> None:
    path = write(comparison(measured=measured), tmp_path, "demo")[1]
    with path.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows
    assert table[-1]["mode"] == "shared"
    assert table[-1]["prompt_tokens_store"] == "30"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = write(comparison(), tmp_path, "demo")[2]
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
