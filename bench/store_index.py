"""What the store keeps of a chunk beside its payload, and what it costs to put, to evict and to ask for one, with a
million chunks of one page: ``python bench/store_index.py [--items N]``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvhearth.store.client.wire import encode_command
from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.dram.index import fingerprint_of
from kvhearth.store.dram.table import Published, Table
from kvhearth.store.policies import POLICY_NAMES
from kvhearth.store.protocol.address import connect, parse_address
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.protocol.packed import pack_keys
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

CHAIN = 256
ASKED = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000, help="chunks held")
    parser.add_argument("--policy", choices=POLICY_NAMES, default="", help="eviction policy (default: the store's)")
    parser.add_argument("--ask", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    items = max(arguments.items // CHAIN, 1) * CHAIN
    if arguments.ask:
        print(json.dumps(ask(arguments.ask, items)))
        return
    config = StoreConfig(
        capacity_bytes=items * PAGE_BYTES, max_items=items, policy=arguments.policy, listen="127.0.0.1:0"
    )
    with StoreServer(config) as server:
        table = server.store.table
        before = resident_bytes()
        put_seconds = fill(table, 0, items)
        each = (resident_bytes() - before) / items
        print(f"{items} chunks, policy {config.policy}: {each:.0f} bytes each beyond payload", flush=True)
        lookup = json.loads(
            subprocess.run(
                [sys.executable, __file__, "--items", str(items), "--ask", server.address],
                check=True, capture_output=True, text=True,
            ).stdout
        )  # fmt: skip
        p50 = lookup["p50_ms"]
        print(f"lookup of {CHAIN} keys over TCP: p50 {p50:.3f} ms, p99 {lookup['p99_ms']:.3f} ms", flush=True)
        evicted = items // 10 // CHAIN * CHAIN
        evict_seconds = fill(table, items, evicted)
        after = (resident_bytes() - before) / items
        assert table.stats().evictions >= evicted - 1
    put_us, evict_us = 1e6 * put_seconds / items, 1e6 * evict_seconds / max(1, evicted)
    print(f"put {put_us:.1f} us of CPU, put with eviction {evict_us:.1f} us")
    print(
        json.dumps(
            {
                "items": items,
                "policy": config.policy,
                "bytes_a_chunk": round(each, 1),
                "bytes_a_chunk_after_evictions": round(after, 1),
                "lookup_256_p50_ms": p50,
                "lookup_256_p99_ms": lookup["p99_ms"],
                "put_cpu_us": round(put_us, 2),
                "put_with_eviction_cpu_us": round(evict_us, 2),
            }
        )
    )


def resident_bytes() -> int:
    """Memory of this process that is there, the pool included."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def key_of(number: int) -> bytes:
    """69 bytes, as the connector's: a short namespace and 256 bits of hash."""
    return b"n001:" + random.Random(number).randbytes(32).hex().encode()


def fill(table: Table, first: int, count: int) -> float:
    """Put chunks of one page, in chains; CPU seconds that the table took."""
    payload = bytes(PAGE_BYTES - HEADER_BYTES)
    seconds, parent = 0.0, 0
    for number in range(first, first + count):
        key = key_of(number)
        position = number % CHAIN
        head = Header(position=position, parent=parent if position else 0, recompute_ns=10**6).sealed(key, payload)
        value = head.pack() + payload
        began = time.thread_time()
        upload = table.reserve(PAGE_BYTES)
        assert upload is not None
        table.upload_views(upload)[0][:] = value
        outcome = table.publish(key, upload)
        seconds += time.thread_time() - began
        assert outcome is Published.STORED
        parent = fingerprint_of(key)
    return seconds


def ask(address: str, items: int) -> dict[str, float]:
    """Ask for whole chains, packed, from another process; milliseconds of each question."""
    sock = connect(parse_address(address), 10.0)
    sock.settimeout(10.0)
    choices = random.Random(1)
    took = []
    expected = b"$%d\r\n%b\r\n" % (CHAIN, b"d" * CHAIN)
    for _ in range(ASKED // 10):
        first = choices.randrange(items // CHAIN) * CHAIN
        packed = pack_keys([key_of(number) for number in range(first, first + CHAIN)])
        assert packed is not None
        question = encode_command(b"KV.MATCH", packed)
        for _ in range(10):
            began = time.perf_counter()
            sock.sendall(question)
            answer = b""
            while len(answer) < len(expected):
                answer += sock.recv(4096)
            took.append(1000 * (time.perf_counter() - began))
            assert answer == expected
    return {"p50_ms": round(statistics.median(took), 4), "p99_ms": round(sorted(took)[len(took) * 99 // 100], 4)}


if __name__ == "__main__":
    main()
