"""DRAM for chunks: a clear message where there is no room, and nothing left behind by engines that are gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvhearth.connector import region
from kvhearth.connector.region import (
    check_chunks,
    check_room,
    expect_no_name,
    hold,
    region_path,
    remove_stale,
    sweep,
    unlink_name,
)
from kvhearth.errors import UserError

ENGINE = "an-engine"


def left_behind(shm: Path, age_seconds: float = 0.0, content: bytes = b"old") -> Path:
    """The region file of an engine."""
    path = shm / f"vllm_offload_{ENGINE}.mmap"
    path.write_bytes(content)
    return path


def started(mark: Path) -> float:
    """Now, by the clock that files are dated with."""
    mark.unlink(missing_ok=True)
    mark.touch()
    return mark.stat().st_ctime


@pytest.fixture
def born_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's parent started after whatever files there are."""
    monkeypatch.setattr(region, "_started_at", lambda pid: time.time() + 60)


def test_the_region_has_vllms_name() -> None:
    assert region_path("abc_dp0") == Path("/dev/shm/vllm_offload_abc_dp0.mmap")


def test_too_little_shared_memory_is_told_with_what_there_is_and_how_to_have_more(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError) as refused:
        check_room(ENGINE, free + 2**40, shm=tmp_path)

    assert refused.value.where == "kv_connector_extra_config.cpu_bytes_to_use"
    assert "TiB for KV in DRAM" in refused.value.what
    assert f"{tmp_path} has" in refused.value.what
    for way in ("lower it", "--shm-size", "--ipc=host", "emptyDir"):
        assert way in refused.value.remedy


def test_enough_shared_memory_a_region_already_made_and_no_shared_memory_at_all_pass(tmp_path: Path) -> None:
    check_room(ENGINE, 4096, shm=tmp_path)
    check_room(ENGINE, 2**60, shm=tmp_path / "absent")
    left_behind(tmp_path)
    check_room(ENGINE, 2**60, shm=tmp_path)


@pytest.mark.parametrize("chunks", [0, 1])
def test_dram_for_less_than_two_chunks_is_refused(chunks: int) -> None:
    with pytest.raises(UserError, match=rf"1 MiB hold {chunks} chunks of 768 KiB; raise it"):
        check_chunks(chunks, 2**20, 768 * 2**10)
    check_chunks(2, 2**20, 2**19)


def test_nothing_to_remove_is_fine(tmp_path: Path) -> None:
    assert remove_stale(ENGINE, shm=tmp_path) is False


def test_the_region_of_an_earlier_start_is_removed(
    tmp_path: Path, born_later: None, caplog: pytest.LogCaptureFixture
) -> None:
    path = left_behind(tmp_path)

    assert remove_stale(ENGINE, shm=tmp_path) is True
    assert not path.exists()
    assert str(path) in caplog.text


def test_a_region_made_since_the_parent_started_stays(tmp_path: Path) -> None:
    path = left_behind(tmp_path)

    assert remove_stale(ENGINE, shm=tmp_path) is False
    assert path.exists()


def test_a_region_stays_when_the_parents_start_cannot_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "_started_at", lambda pid: None)
    path = left_behind(tmp_path)

    assert remove_stale(ENGINE, shm=tmp_path) is False
    assert path.exists()


def test_the_files_of_other_engines_stay(tmp_path: Path, born_later: None) -> None:
    left_behind(tmp_path)
    other = tmp_path / "vllm_offload_another.mmap"
    other.write_bytes(b"x")
    remove_stale(ENGINE, shm=tmp_path)

    assert other.exists()


LOOK_TWICE = """
import os, sys, pathlib
from kvhearth.connector.region import remove_stale
folder = pathlib.Path(sys.argv[1])

def child_looks():
    pid = os.fork()
    if not pid:
        os._exit(int(remove_stale("an-engine", shm=folder)))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

first = child_looks()
(folder / "vllm_offload_an-engine.mmap").write_bytes(b"new")
print(first, child_looks())
"""


def test_children_remove_a_file_older_than_their_parent_and_none_made_since(tmp_path: Path) -> None:
    path = left_behind(tmp_path)
    time.sleep(1.1)  # the kernel tells when it was started in whole seconds
    done = subprocess.run(
        [sys.executable, "-c", LOOK_TWICE, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.split() == ["1", "0"]
    assert path.read_bytes() == b"new"


def test_of_two_workers_that_start_at_once_one_removes_and_neither_the_others_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removes what is stale, then makes or joins the region, as vLLM does: all must end on one file."""
    for _ in range(20):
        old = left_behind(tmp_path)
        while (born := started(tmp_path / "parent")) <= old.stat().st_ctime:
            time.sleep(0.005)
        monkeypatch.setattr(region, "_started_at", lambda pid, born=born: born)
        barrier = threading.Barrier(4)
        removed: list[bool] = []
        inodes: list[int] = []

        def worker(old: Path = old, barrier=barrier, removed=removed, inodes=inodes) -> None:
            barrier.wait(10)
            removed.append(remove_stale(ENGINE, shm=tmp_path))
            try:
                descriptor = os.open(old, os.O_CREAT | os.O_EXCL | os.O_RDWR)
            except FileExistsError:
                descriptor = os.open(old, os.O_RDWR)
            inodes.append(os.fstat(descriptor).st_ino)
            os.close(descriptor)

        threads = [threading.Thread(target=worker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

        assert sum(removed) == 1
        assert len(inodes) == 4
        assert set(inodes) == {old.stat().st_ino}
        old.unlink()


def test_a_name_is_taken_away_once_and_asking_again_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "SHM", tmp_path)
    path = left_behind(tmp_path)
    unlink_name(ENGINE)
    unlink_name(ENGINE)

    assert not path.exists()


def test_a_region_without_a_name_cleans_up_quietly_and_one_with_a_name_removes_it(tmp_path: Path) -> None:
    def made(path: Path) -> SimpleNamespace:
        def cleanup() -> None:
            if region._creator:
                os.unlink(region.mmap_path)

        region = SimpleNamespace(_creator=True, mmap_path=str(path), cleanup=cleanup)
        return region

    nameless, named = made(tmp_path / "gone"), made(left_behind(tmp_path))
    for each in (nameless, named):
        expect_no_name(each)
        each.cleanup()

    assert not Path(named.mmap_path).exists()


def made(path: Path) -> SimpleNamespace:
    """A region as vLLM makes one."""
    path.write_bytes(b"kv")
    path.chmod(0o600)
    return SimpleNamespace(fd=os.open(path, os.O_RDWR))


def test_regions_of_engines_that_died_while_they_warmed_up_are_removed(tmp_path: Path) -> None:
    """Whatever their id: a crash loop must not fill shared memory."""
    dead, alive, foreign = (tmp_path / f"vllm_offload_{name}.mmap" for name in ("dead", "alive", "foreign"))
    regions = [made(path) for path in (dead, alive, foreign)]
    hold(regions[0])
    hold(regions[1])
    os.close(regions[0].fd)  # as the end of its process does

    assert sweep(shm=tmp_path) == 1
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()  # no one has said that it is ours
    os.close(regions[1].fd)
    os.close(regions[2].fd)
    assert sweep(shm=tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["vllm_offload_foreign.mmap"]


def test_two_that_sweep_at_once_remove_each_region_once(tmp_path: Path) -> None:
    for number in range(50):
        region_made = made(tmp_path / f"vllm_offload_{number}.mmap")
        hold(region_made)
        os.close(region_made.fd)
    counts: list[int] = []
    threads = [threading.Thread(target=lambda: counts.append(sweep(shm=tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert list(tmp_path.iterdir()) == [] or sweep(shm=tmp_path) == 50 - sum(counts)
    assert list(tmp_path.iterdir()) == []
