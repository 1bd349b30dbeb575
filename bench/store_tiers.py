"""The store's lower tiers: how soon a disk tier of many files serves and is whole after a start, what it remembers of a
file, and how fast disk and S3 (SeaweedFS) take and give values: ``python bench/store_tiers.py [--quick] [--files N]``.

Run as root, the files lie on a loop device that is mounted anew before the start, so that nothing of them is cached;
else the start is warm, and the output says so. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvhearth.store.protocol.header import Header
from kvhearth.store.tiers.disk import DiskTier
from kvhearth.store.tiers.files import pack_start
from kvhearth.store.tiers.folder import Folder
from kvhearth.store.tiers.names import entry_of
from kvhearth.store.tiers.objects import ObjectTier
from kvhearth.store.tiers.port import Tier

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "store"))
from seaweed import BUCKET, seaweed

MIB = 2**20
VALUE_BYTES = 1024
SIZES = (2 * MIB, 16 * MIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20,000 files and less to move")
    parser.add_argument("--files", type=int, default=0, help="files of the start (default 200,000)")
    arguments = parser.parse_args()
    files = arguments.files or (20_000 if arguments.quick else 200_000)
    moved, rounds = (64 * MIB, 3) if arguments.quick else (256 * MIB, 9)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvhearth-bench-") as folder:
        result["start"] = start_again(Path(folder), files)
        print(f"start: {result['start']}", flush=True)
        result["bytes_a_file"] = memory_a_file(files)
        print(f"memory: {result['bytes_a_file']:.0f} bytes a file", flush=True)
        tier = DiskTier(Path(folder) / "disk", 2**34, reserve_bytes=0)
        tier.start()
        result["disk_gbps"] = throughput(tier, moved, rounds, threads=1, uncache=lambda: drop(Path(folder) / "disk"))
        tier.close()
        print(f"disk GB/s: {result['disk_gbps']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvhearth-bench-") as folder, seaweed(Path(folder), volumes=128) as server:
        objects = ObjectTier(f"s3://{BUCKET}/bench", access=server.access, timeout_seconds=60)
        objects.start()
        result["s3_gbps"] = throughput(objects, moved, rounds // 3, threads=8, uncache=lambda: None)
        objects.close()
        print(f"S3 GB/s, 8 at once: {result['s3_gbps']}", flush=True)
    print(json.dumps(result))


def start_again(folder: Path, files: int) -> dict[str, Any]:
    """Seconds from the start of a tier of ``files`` files to its first hits and to the whole index."""
    with volume(folder, files) as (place, remount):
        fill(place / "tier", files)
        cold = remount()
        began = time.perf_counter()
        tier = DiskTier(place / "tier", 2**40, 2 * files, reserve_bytes=0)
        tier.start()
        buffer = memoryview(bytearray(VALUE_BYTES))
        hits = []
        for number in random.Random(0).sample(range(files), 20):
            asked = key_of(number)
            assert tier.has([asked]) == [VALUE_BYTES]
            assert tier.read_into(asked, [buffer], time.monotonic() + 30)
            hits.append(time.perf_counter() - began)
        while not tier.ready:
            time.sleep(0.005)
        whole = time.perf_counter() - began
        assert tier.stats().items == files, tier.stats()
        tier.close()
    return {
        "files": files,
        "cold": cold,
        "first_hit_seconds": round(hits[0], 3),
        "twentieth_hit_seconds": round(hits[-1], 3),
        "whole_seconds": round(whole, 3),
    }


@contextlib.contextmanager
def volume(folder: Path, files: int) -> Iterator[tuple[Path, Callable[[], bool]]]:
    """A place for the files, and what empties the caches of it (False: it cannot)."""
    image, place = folder / "image", folder / "volume"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(files * 8192 + 256 * MIB)
    mount = ["mount", "-o", "loop", str(image), str(place)]
    mkfs = shutil.which("mkfs.ext4", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")  # often on root's path only
    make = [mkfs or "false", "-q", "-F", "-N", str(files + 20_000), str(image)]
    if (
        subprocess.run(make, check=False).returncode
        or subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode
    ):
        image.unlink()
        yield place, lambda: False
        return

    def remount() -> bool:
        subprocess.run(["umount", str(place)], check=True)
        with image.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        subprocess.run(mount, check=True)
        return True

    try:
        yield place, remount
    finally:
        subprocess.run(["umount", str(place)], check=True)
        image.unlink()


def key_of(number: int) -> bytes:
    """A key as long as the connector's."""
    return b"kvh1:" + number.to_bytes(8, "big") * 7 + b"\0\0\0\1"


def fill(path: Path, files: int) -> None:
    row = os.urandom(VALUE_BYTES - 64)
    folder = Folder(path, create=True)
    for number in range(files):
        key = key_of(number)
        header = Header(position=number % 64, parent=number * 7919, recompute_ns=5_000_000).sealed(key, row)
        views = [memoryview(header.pack()), memoryview(row)]
        folder.publish(folder.write_aside(pack_start(key, views), views), entry_of(key, views, time.time_ns() // 1000))
    folder.close()


def memory_a_file(files: int) -> float:
    """Bytes of memory that the index takes for each file, the key of 65 bytes included."""
    from kvhearth.store.tiers.catalog import Catalog
    from kvhearth.store.tiers.names import Entry

    tracemalloc.start()
    catalog = Catalog(2**40, files, "lru")
    for first in range(0, files, 1000):
        catalog.found([Entry(key_of(n), 1, n, n, n, n) for n in range(first, min(first + 1000, files))])
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(catalog) == files
    return taken / files


def throughput(
    tier: Tier, moved: int, rounds: int, *, threads: int, uncache: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """GB/s by size; ``read`` from the device as far as ``uncache`` works, ``read_cached`` at once again."""
    result = {}
    for nbytes in SIZES:
        keys = [b"%d-%d" % (nbytes, number) for number in range(moved // nbytes)]
        data = memoryview(os.urandom(nbytes))
        buffers = [memoryview(bytearray(nbytes)) for _ in range(threads)]
        figures: dict[str, list[float]] = {"write": [], "read": [], "read_cached": []}
        with ThreadPoolExecutor(threads) as pool:

            def timed(work: Callable[[int], bool], pool: ThreadPoolExecutor = pool, nbytes: int = nbytes) -> float:
                began = time.perf_counter()
                assert all(pool.map(work, range(moved // nbytes))), tier.stats()
                return moved / (time.perf_counter() - began) / 1e9

            def write(number: int, keys: list[bytes] = keys, data: memoryview = data) -> bool:
                return tier.write(keys[number], [data])

            def read(number: int, keys: list[bytes] = keys, free: list[memoryview] = buffers) -> bool:
                buffer = free.pop()
                try:
                    return tier.read_into(keys[number], [buffer], time.monotonic() + 60)
                finally:
                    free.append(buffer)

            for _ in range(max(1, rounds)):
                figures["write"].append(timed(write))
                uncache()
                figures["read"].append(timed(read))
                figures["read_cached"].append(timed(read))
        tier.delete(keys)
        result[f"{nbytes // MIB}MiB"] = {name: round(statistics.median(runs), 3) for name, runs in figures.items()}
    return result


def drop(folder: Path) -> None:
    """Write the files out and take them from the page cache."""
    for path in folder.rglob("*-*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
