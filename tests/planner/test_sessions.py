"""Agent sessions keep their arrivals, lengths and sharing; a broken file is named with its field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.planner.sessions import read_sessions
from kvhearth.planner.workload import total_tokens

AGENTIC = Path(__file__).parents[3] / "shared" / "data" / "agentic"
GOOD = {"t": 0.0, "in": 150, "out": 5, "hash_ids": [1, 2]}


def written(folder: Path, *requests: object, name: str = "a", block_size: object = 64) -> Path:
    (folder / f"{name}.json").write_text(json.dumps({"block_size": block_size, "requests": list(requests)}))
    return folder


def test_equal_ids_are_equal_text_within_a_session_only(tmp_path: Path) -> None:
    later = GOOD | {"t": 2.5, "in": 128, "hash_ids": [1, 9]}
    written(tmp_path, GOOD, later)
    written(tmp_path, GOOD, name="b")
    users = read_sessions(tmp_path).users
    assert [user.start_ns for user in users] == [0, 0, 2_500_000_000]
    first, other, second = (user.turns[0].segments for user in users)
    assert [total_tokens(segments) for segments in (first, other, second)] == [150, 150, 128]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"in": 0}, r"requests\[1\].in: 0 is no whole number"),
        ({"out": "x"}, r"requests\[1\].out: 'x'"),
        ({"t": -1}, r"requests\[1\].t: -1 is no time"),
        ({"hash_ids": [1, 2, 3, 4]}, r"hash_ids: 4 ids for 150 tokens in blocks of 64"),
        ({"hash_ids": [1, -2]}, r"hash_ids: not a list of whole numbers"),
    ],
)
def test_a_broken_request_is_named(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_sessions(written(tmp_path, GOOD, GOOD | change))


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no session"):
        read_sessions(tmp_path)
    with pytest.raises(UserError, match="block_size: None"):
        read_sessions(written(tmp_path, GOOD, block_size=None))
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(UserError, match=r"a\.json: not JSON"):
        read_sessions(tmp_path)


@pytest.mark.skipif(not AGENTIC.exists(), reason="the public agent sessions are not beside this checkout")
def test_the_public_sessions_are_read_whole() -> None:
    assert read_sessions(AGENTIC).requests == 493
