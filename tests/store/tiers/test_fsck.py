"""fsck tells an operator what a disk tier's folder holds, deletes only what is worth nothing, never under a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.store.tiers.fsck import Tally, fsck

from .conftest import StartDisk, files_in, get, put


@pytest.fixture
def damaged(start_disk: StartDisk, tmp_path: Path) -> Path:
    """A folder with three good files, one of each kind of bad ones, and strangers."""
    tier = start_disk()
    keys = [b"good1", b"good2", b"flip", b"cut", b"version", b"x" * 300]
    assert all(put(tier, key, key * 20) for key in keys)
    entries = {key: tier._catalog.get(key) for key in keys}
    tier.close()
    by_key = {key: next(p for p in files_in(tmp_path / "tier") if key * 20 in p.read_bytes()) for key in entries}
    raw = bytearray(by_key[b"flip"].read_bytes())
    raw[-1] ^= 1
    by_key[b"flip"].write_bytes(raw)
    by_key[b"cut"].write_bytes(by_key[b"cut"].read_bytes()[:-5])
    raw = bytearray(by_key[b"version"].read_bytes())
    raw[4] = 9
    by_key[b"version"].write_bytes(raw)
    (tmp_path / "tier" / "tmp" / "12-3").write_bytes(b"half")
    (tmp_path / "tier" / "notes.txt").write_bytes(b"mine")
    return tmp_path / "tier"


def test_it_counts_good_corrupt_foreign_and_leftover_and_touches_nothing(damaged: Path) -> None:
    before = {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()}
    seen: list[tuple[int, int]] = []
    report = fsck(damaged, progress=lambda files, nbytes: seen.append((files, nbytes)))
    assert report.good.files == 3
    assert {reason: tally.files for reason, tally in report.corrupt.items()} == {"checksum": 1, "truncated": 1}
    assert report.foreign.files == 2
    assert report.leftover == Tally(1, 4)
    assert report.deleted == Tally()
    total = sum(len(raw) for path, raw in before.items() if path.name != "lock")
    assert seen[-1] == (8, total)
    assert {path: path.read_bytes() for path in damaged.rglob("*") if path.is_file()} == before


def test_deleting_removes_what_is_worth_nothing_and_only_that(damaged: Path, start_disk: StartDisk) -> None:
    assert fsck(damaged, delete=True).deleted.files == 3
    report = fsck(damaged)
    assert (report.good.files, report.corrupt, report.foreign.files, report.leftover.files) == (3, {}, 2, 0)
    tier = start_disk()
    assert get(tier, b"good1") == b"good1" * 20
    assert get(tier, b"x" * 300) == b"x" * 300 * 20


def test_a_folder_in_use_a_stranger_and_none_at_all_are_refused(start_disk: StartDisk, tmp_path: Path) -> None:
    start_disk()
    with pytest.raises(UserError, match="a server uses"):
        fsck(tmp_path / "tier")
    with pytest.raises(UserError, match="no folder of a disk tier"):
        fsck(tmp_path)
    with pytest.raises(UserError, match="no folder of a disk tier"):
        fsck(tmp_path / "nowhere")
