"""A Mooncake trace keeps its arrivals, lengths and sharing; a broken line is named with its field and the remedy."""

import json
from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import total_tokens

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation.jsonl"
GOOD = {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_equal_hash_ids_are_equal_text(tmp_path: Path) -> None:
    later = GOOD | {"timestamp": 3000, "hash_ids": [0, 1, 9]}
    workload = read_mooncake(written(tmp_path, GOOD, "", later))
    a, b = (user.turns[0].segments for user in workload.users)
    assert [total_tokens(x) for x in (a, b)] == [1100, 1100]
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    assert [user.start_ns for user in workload.users] == [0, 2_000_000_000]


def test_too_long_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    long = GOOD | {"input_length": 512 * 9, "hash_ids": list(range(9))}
    workload = read_mooncake(written(tmp_path, GOOD, long), max_tokens=2000)
    assert workload.requests == 1
    assert "1 of 2 left out" in workload.note


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ("[]", "instead of an object"),
        ({k: v for k, v in GOOD.items() if k != "output_length"}, "'output_length' is missing"),
        (GOOD | {"input_length": 0}, "input_length is 0"),
        (GOOD | {"output_length": "7"}, "output_length is '7'"),
        (GOOD | {"timestamp": -1}, "timestamp is -1"),
        (GOOD | {"hash_ids": [0]}, "1 entries for input_length 1100"),
        (GOOD | {"hash_ids": [0, 1, -2]}, "hash_ids is not a list"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, named: str) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(UserError, match=named) as wrong:
        read_mooncake(path)
    assert str(wrong.value).startswith(f"{path}:2: ")
    assert wrong.value.remedy


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the trace"):
        read_mooncake(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="the trace is empty"):
        read_mooncake(written(tmp_path, ""))


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the public Mooncake trace is not beside this checkout")
def test_the_public_trace_is_read_whole() -> None:
    assert read_mooncake(MOONCAKE, 1000).requests == 1000
    assert read_mooncake(MOONCAKE).requests == 12_031
