"""Broken and random bytes for everything that reads the store's wire: ``python bench/fuzz.py [--quick] [--inputs N]``.

Commands of RESP, packed keys and value headers, in turn: valid ones, valid ones damaged, and noise, cut up as a network
would. Each input must end in a value or in the parser's own error, what is valid must come back as it was sent, and the
process may not grow. Inputs follow from ``--seed``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvhearth.store.client.wire import encode_command
from kvhearth.store.protocol.header import HEADER_BYTES, Header, HeaderError, peek_header, unpack_header
from kvhearth.store.protocol.packed import MAGIC, PackedKeysError, pack_keys, unpack_keys
from kvhearth.store.protocol.resp import CommandReader, ConnectionGone, ProtocolError

INPUTS = 1_000_000
GROWTH_BYTES = 16 * 2**20
_COMMANDS = 4000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TOKENS = (
    b"\r\n",
    b"*",
    b"$",
    b"-",
    b"*1\r\n",
    b"$0\r\n\r\n",
    b"$-1\r\n",
    b"*99999\r\n",
    b"$999999999999\r\n",
    b"PING\r\n",
)


class Outcome(NamedTuple):
    """Of a batch: inputs read to a value and refused, and what the process grew by meanwhile."""

    values: int
    refused: int
    grown_bytes: int


class Stream:
    """A socket with these bytes, received in pieces of up to ``piece`` bytes."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data = memoryview(data)
        self._piece = piece

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        count = min(self._piece, len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        return self.recv_into(buffers[0]), [], 0, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: a million inputs take under a minute")
    parser.add_argument("--inputs", type=int, default=INPUTS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    workers = min(len(os.sched_getaffinity(0)), 8)
    shares = [(given.seed + n, given.inputs // workers + (n < given.inputs % workers)) for n in range(workers)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        outcomes = pool.starmap(run, shares, chunksize=1)
    grown = max(outcome.grown_bytes for outcome in outcomes)
    figures = {
        "bench": "fuzz",
        "inputs": given.inputs,
        "values": sum(outcome.values for outcome in outcomes),
        "refused": sum(outcome.refused for outcome in outcomes),
        "grown_bytes": grown,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    if grown > GROWTH_BYTES:
        sys.exit(f"a process grew by {grown} bytes")


def run(seed: int, inputs: int) -> Outcome:
    """Feed ``inputs`` to the parsers. What a parser raises beside its own error ends the benchmark."""
    rng = random.Random(seed)
    commands = [_command(rng) for _ in range(_COMMANDS)]
    stream = partial(one_stream, [(args, encode_command(*args)) for args in commands])
    targets: tuple[Callable[[random.Random], bool], ...] = (stream, one_packed, stream, one_header)
    values, before = 0, 0
    for number in range(inputs):
        if number == inputs // 10:  # what is allocated once is there by now
            before = resident_bytes()
        try:
            values += targets[number % len(targets)](rng)
        except BaseException:
            print(f"seed {seed}, input {number}", file=sys.stderr)
            raise
    return Outcome(values, inputs - values, resident_bytes() - before)


def one_stream(commands: list[tuple[list[bytes], bytes]], rng: random.Random) -> bool:
    """One or two commands, or something like them; True when all of them were read."""
    chosen = [commands[int(rng.random() * _COMMANDS)] for _ in range(1 + (rng.random() < 0.5))]
    sent = [args for args, _ in chosen]
    data = b"".join([encoded for _, encoded in chosen])
    damaged = rng.random() < 0.7
    if damaged:
        data = _damaged(rng, data)
    reader = CommandReader(Stream(data, 1 + int(rng.random() * 200) if rng.random() < 0.3 else len(data)))
    received: list[object] = []
    try:
        while len(received) < 64:
            if not reader.inline_ping():
                received.append(_read_command(rng, reader))
    except ProtocolError:
        if not damaged:
            raise
        return False
    except ConnectionGone:
        pass
    if not damaged and received != sent:
        raise AssertionError(f"{sent!r} was read as {received!r}")
    return not damaged


def one_packed(rng: random.Random) -> bool:
    """Packed keys, or something like them."""
    size, count = int(1 + rng.random() * 80), int(1 + rng.random() * 20)
    keys = [key for (key,) in struct.iter_unpack(f"{size}s", rng.randbytes(size * count))]
    packed = pack_keys(keys)
    assert packed is not None
    damaged = rng.random() < 0.7
    data = (
        (_damaged(rng, packed) if rng.random() < 0.8 else MAGIC + rng.randbytes(rng.randint(0, 40)))
        if damaged
        else packed
    )
    try:
        found = unpack_keys(data)
    except PackedKeysError:
        if not damaged:
            raise
        return False
    if pack_keys(found) != data or (not damaged and found != keys):
        raise AssertionError(f"{data!r} was read as {found!r}")
    return True


def one_header(rng: random.Random) -> bool:
    """A value's header, or something like it."""
    header = Header(
        rng.getrandbits(32), rng.getrandbits(64), rng.getrandbits(63), rng.getrandbits(32), rng.getrandbits(64)
    )
    row = rng.randbytes(20)
    packed = header.sealed(b"key", row).pack()
    damaged = rng.random() < 0.7
    data = packed
    if damaged:
        data = _damaged(rng, packed) if rng.random() < 0.8 else rng.randbytes(HEADER_BYTES)
    peek_header(data)
    try:
        found = unpack_header(data)
    except HeaderError:
        if not damaged:
            raise
        return False
    if found.pack() != data or found.matches(b"key", row) != (data == packed):
        raise AssertionError(f"{data!r} was read as {found!r}")
    return True


def _command(rng: random.Random) -> list[bytes]:
    kind = rng.random()
    if kind < 0.3:
        return [b"GET", rng.randbytes(64)]
    if kind < 0.6:
        return [b"SET", rng.randbytes(rng.randint(0, 80)), rng.randbytes(rng.choice((0, 1, 64, 600)))]
    if kind < 0.8:
        size = rng.choice((0, 3, 32))
        return [b"KV.MATCH", *[rng.randbytes(size) for _ in range(rng.randint(0, 24))]]
    return [rng.randbytes(rng.randint(0, 12)) for _ in range(rng.randint(1, 12))]


def _read_command(rng: random.Random, reader: CommandReader) -> list[bytes]:
    count = reader.array_length()
    if count != 3 or rng.random() < 0.3:
        return reader.args(count)
    args = reader.args(2)  # as SET is read: the value goes where it is to stay
    length = reader.bulk_length()
    if length > 4096:
        reader.discard(length)
        return args
    value = bytearray(length)
    reader.payload_into([memoryview(value)[: length // 2], memoryview(value)[length // 2 :]])
    return [*args, bytes(value)]


def _damaged(rng: random.Random, data: bytes) -> bytes:
    """``data`` with one to four of: a byte changed, some cut out or doubled, noise or a token put in, its end cut."""
    changed = bytearray(data)
    for _ in range(int(1 + rng.random() * 4)):
        at, kind, count = int(rng.random() * (len(changed) + 1)), int(rng.random() * 6), int(1 + rng.random() * 30)
        if kind == 0 and at < len(changed):
            changed[at] = rng.getrandbits(8)
        elif kind == 1:
            del changed[at : at + count]
        elif kind == 2:
            changed[at:at] = changed[at : at + count]
        elif kind == 3:
            changed[at:at] = rng.randbytes(count)
        elif kind == 4:
            changed[at:at] = rng.choice(_TOKENS)
        else:
            del changed[at:]
    return bytes(changed)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    main()
