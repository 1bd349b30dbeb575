"""`kvhearth store bench`: a short load against a running store, with the client that engines use."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from kvhearth.cli import console
from kvhearth.cli.store_target import Target, no_answer, takes_target
from kvhearth.errors import UserError
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.ring.client import StoreRing
from kvhearth.units import format_bytes, parse_bytes

_ROWS_EACH = 16
_LOOKUP_KEYS = 256
_GIGA = 1e9

Client = StoreClient | StoreRing


@dataclass
class _Worker:
    """One connection's tally; written by its thread alone."""

    index: int
    turns: int = 0
    moved: int = 0
    latencies: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(frozen=True)
class Figures:
    """What a run has measured. GB are 10**9 bytes."""

    address: str
    size_bytes: int
    connections: int
    put_gb_per_second: float
    get_gb_per_second: float
    lookup_keys: int
    lookup_p50_seconds: float
    lookup_p99_seconds: float
    lookups_per_second: float
    failures: dict[str, int]


@takes_target
def bench(
    target: Target,
    *,
    seconds: Annotated[float, typer.Option(help="How long, in all: a third each for puts, gets and lookups.")] = 6.0,
    size: Annotated[str, typer.Option(help="Bytes of each row, such as 2MiB.")] = "2MiB",
    connections: Annotated[int, typer.Option(help="Connections, each with a thread.", min=1, max=64)] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load a running store with puts, gets and lookups of 256 keys, and say how quick it is.

    It fills 16 rows a connection under a namespace of its own and deletes them at the end; what a full store holds may
    be evicted for them.
    """
    nbytes = parse_bytes(size, where="--size")
    if not 1 <= nbytes <= 2**30 or not 0.1 <= seconds <= 3600:
        raise UserError(f"{size} for {seconds:g} s", where="bench", remedy="give 1 byte to 1GiB, 0.1 to 3600 seconds")
    client = target.client(max_connections=connections)
    try:
        reason = client.ping()
        if reason is not None:
            raise no_answer(target.address, reason.value)
        figures = _measure(client, target.address, nbytes, connections, seconds)
    finally:
        client.close()
    if as_json:
        typer.echo(json.dumps(asdict(figures)))
    else:
        _print(figures)


def _measure(client: Client, address: str, nbytes: int, connections: int, seconds: float) -> Figures:
    prefix = b"kvhearth-bench-%b:" % os.urandom(8).hex().encode()
    chain = [b"%bchain-%d" % (prefix, number) for number in range(_LOOKUP_KEYS)]
    rows = [_keys_of(prefix, index) for index in range(connections)]
    row = memoryview(os.urandom(min(nbytes, 2**20)) * (nbytes // 2**20 + 1))[:nbytes]
    buffers = [bytearray(nbytes) for _ in range(connections)]

    def put(worker: _Worker) -> None:
        outcome = client.put_many([Put(rows[worker.index][worker.turns % _ROWS_EACH], Header(), row)])[0]
        if outcome.reason is None:
            worker.moved += nbytes
        else:
            worker.failed(f"put {outcome.reason.value}")

    def get(worker: _Worker) -> None:
        tried = min(_ROWS_EACH, max(1, puts[worker.index].turns))
        key = rows[worker.index][worker.turns % tried]
        outcome = client.get_many_into([key], [buffers[worker.index]])[0]
        if outcome.reason is None:
            worker.moved += nbytes
        else:
            worker.failed(f"get {outcome.reason.value}")

    def look_up(worker: _Worker) -> None:
        begun = time.perf_counter()
        if client.match(chain) == _LOOKUP_KEYS:
            worker.latencies.append(time.perf_counter() - begun)
        else:
            worker.failed("lookup incomplete")

    try:
        client.put_many([Put(key, Header(), b"") for key in chain])
        puts, put_seconds = _phase("puts", put, connections, seconds / 3)
        gets, get_seconds = _phase("gets", get, connections, seconds / 3)
        lookups, lookup_seconds = _phase("lookups", look_up, connections, seconds / 3)
    finally:
        client.delete_many([*chain, *(key for keys in rows for key in keys)])
    latencies = sorted(latency for worker in lookups for latency in worker.latencies)
    failures: dict[str, int] = {}
    for worker in (*puts, *gets, *lookups):
        for reason, number in worker.failures.items():
            failures[reason] = failures.get(reason, 0) + number
    return Figures(
        address=address,
        size_bytes=nbytes,
        connections=connections,
        put_gb_per_second=sum(worker.moved for worker in puts) / put_seconds / _GIGA,
        get_gb_per_second=sum(worker.moved for worker in gets) / get_seconds / _GIGA,
        lookup_keys=_LOOKUP_KEYS,
        lookup_p50_seconds=_quantile(latencies, 0.5),
        lookup_p99_seconds=_quantile(latencies, 0.99),
        lookups_per_second=len(latencies) / lookup_seconds,
        failures=failures,
    )


def _phase(name: str, work: Callable[[_Worker], None], connections: int, seconds: float) -> tuple[list[_Worker], float]:
    """Run ``work`` again and again on every connection for so long; the tallies, and the seconds it took in fact."""
    workers = [_Worker(index) for index in range(connections)]
    begun = time.monotonic()
    stop = begun + seconds

    def repeat(worker: _Worker) -> None:
        while time.monotonic() < stop:
            work(worker)
            worker.turns += 1

    threads = [threading.Thread(target=repeat, args=(worker,), daemon=True) for worker in workers]
    with console.progress() as bar:
        task = bar.add_task(name, total=seconds)
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            bar.update(task, completed=min(seconds, time.monotonic() - begun))
            time.sleep(0.05)
    return workers, time.monotonic() - begun


def _print(figures: Figures) -> None:
    table = console.table("measured", "value", right=["value"])
    table.add_row("connections", str(figures.connections))
    table.add_row("row", format_bytes(figures.size_bytes))
    table.add_row("PUT, GB/s", f"{figures.put_gb_per_second:.2f}")
    table.add_row("GET, GB/s", f"{figures.get_gb_per_second:.2f}")
    table.add_row(f"lookup of {figures.lookup_keys} keys, p50, ms", f"{figures.lookup_p50_seconds * 1e3:.3f}")
    table.add_row(f"lookup of {figures.lookup_keys} keys, p99, ms", f"{figures.lookup_p99_seconds * 1e3:.3f}")
    table.add_row("lookups/s", f"{figures.lookups_per_second:,.0f}")
    console.out.print(table)
    for reason, number in sorted(figures.failures.items()):
        console.warn(f"{number} x {reason}")


def _keys_of(prefix: bytes, index: int) -> list[bytes]:
    return [b"%brow-%d-%d" % (prefix, index, number) for number in range(_ROWS_EACH)]


def _quantile(ordered: list[float], share: float) -> float:
    """The smallest of the ordered numbers that at least ``share`` of them do not exceed; 0 of none."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
