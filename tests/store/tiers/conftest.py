"""Disk tiers in a folder of the test's own, a real S3 server behind a proxy, and small file systems."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.store.tiers import disk, objects
from kvhearth.store.tiers.disk import DiskTier
from kvhearth.store.tiers.port import Tier

from ..proxy import Proxy
from ..seaweed import Seaweed, seaweed

MIB = 2**20
PATIENCE_SECONDS = 30.0


StartDisk = Callable[..., DiskTier]


def get(tier: Tier, key: bytes, seconds: float = 10.0) -> bytes | None:
    """The value as a client would get it: found, room made, read; None for a miss."""
    nbytes = tier.has([key])[0]
    buffer = bytearray(nbytes)
    half = nbytes // 2
    views = [memoryview(buffer)[:half], memoryview(buffer)[half:]]
    return bytes(buffer) if nbytes and tier.read_into(key, views, time.monotonic() + seconds) else None


def put(tier: Tier, key: bytes, value: bytes) -> bool:
    """Write the value from two pieces of memory."""
    half = len(value) // 3
    return tier.write(key, [memoryview(value)[:half], memoryview(value)[half:]])


def wait_for(condition: Callable[[], object]) -> None:
    """Return as soon as it holds; fail if it does not within half a minute."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def files_in(folder: Path) -> list[Path]:
    """The values' files of a disk tier."""
    return sorted(path for path in folder.glob("[0-9a-f][0-9a-f]/*/*") if path.is_file())


@pytest.fixture(autouse=True)
def _quick_tending(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a tier does by itself each second, or half of one; nobody should wait that long for it here.
    for module in (disk, objects):
        monkeypatch.setattr(module, "_TEND_SECONDS", 0.05)
        monkeypatch.setattr(module, "_TEND_SICK_SECONDS", 0.05)


@pytest.fixture
def start_disk(tmp_path: Path) -> Iterator[StartDisk]:
    """Starts disk tiers of 64 MiB in ``tmp_path / "tier"`` until they are ready; keywords are `DiskTier`'s."""
    tiers: list[DiskTier] = []

    def start(*, wait: bool = True, **settings: Any) -> DiskTier:
        arguments = {"folder": tmp_path / "tier", "capacity_bytes": 64 * MIB, "reserve_bytes": 0, **settings}
        tier = DiskTier(**arguments)
        tiers.append(tier)
        tier.start()
        if wait:
            wait_for(lambda: tier.ready)
        return tier

    yield start
    for tier in tiers:
        tier.close()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS, once for all tests of a process."""
    with seaweed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def s3_proxy(s3: Seaweed) -> Iterator[Proxy]:
    """A proxy before `s3` that can misbehave."""
    proxy = Proxy(s3.port)
    yield proxy
    proxy.close()


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB: ext4 on a loop device, else tmpfs; skipped where mounting is not permitted."""
    place, image = tmp_path / "volume", tmp_path / "image"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(24 * MIB)
    ways = [["mount", "-t", "tmpfs", "-o", "size=24M", "tmpfs", str(place)]]
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")  # often on root's path only
    options = ["-q", "-F", "-O", "^has_journal"]
    if mkfs and subprocess.run([mkfs, *options, str(image)], check=False, capture_output=True).returncode == 0:
        ways.insert(0, ["mount", "-o", "loop", str(image), str(place)])
    if not any(subprocess.run(way, check=False, capture_output=True).returncode == 0 for way in ways):
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)
