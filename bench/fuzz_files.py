"""A million and more inputs for what reads files, file names and object names of the store's lower tiers: noise, and
good ones damaged. None may raise anything but a miss, give out other bytes than were written, or keep memory:
``python bench/fuzz_files.py [--quick] [--inputs N] [--seed N]``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time

from kvhearth.store.protocol.header import Header
from kvhearth.store.tiers.bucket import key_of, name_of
from kvhearth.store.tiers.files import FileError, pack_start, parse_file
from kvhearth.store.tiers.names import Entry, parse_name, path_of

LEAK_BYTES = 16 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="as the full run; it takes some 15 seconds")
    parser.add_argument("--inputs", type=int, default=1_050_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(fuzz(arguments.inputs, arguments.seed)))


def fuzz(inputs: int, seed: int) -> dict[str, float]:
    """Run ``inputs`` inputs.

    Raises:
        AssertionError: wrong bytes were given out, or memory grew.
    """
    source = random.Random(seed)
    began = time.perf_counter()
    tenth = max(1, inputs // 10)
    for _ in range(tenth):  # what the interpreter keeps for itself, it has now
        one_input(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for _ in range(inputs - tenth):
        one_input(source)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown <= LEAK_BYTES, f"memory grew by {grown} bytes"
    return {"inputs": inputs, "seconds": round(time.perf_counter() - began, 1), "grown_bytes": grown}


def one_input(source: random.Random) -> None:
    (damaged_file, noise_file, damaged_name, damaged_object)[source.randrange(4)](source)


def damaged_file(source: random.Random) -> None:
    key = source.randbytes(source.randint(1, 40))
    value = source.randbytes(source.randrange(200))
    if source.random() < 0.1:
        value = Header(position=source.randrange(2**32)).sealed(key, value).pack() + value
    raw = pack_start(key, [memoryview(value)]) + value
    other = damage(raw, source)
    try:
        assert parse_file(memoryview(other), key) == value
        assert other == raw, "a damaged file was taken for whole"
    except FileError:
        assert other != raw, "a whole file was taken for damaged"


def noise_file(source: random.Random) -> None:
    noise = source.choice((b"", b"KVHF", b"KVHF\1\0")) + source.randbytes(source.randrange(80))
    try:
        parse_file(memoryview(noise), b"key")
    except FileError:
        return
    raise AssertionError("noise was taken for a file")


def damaged_name(source: random.Random) -> None:
    numbers = (source.randrange(2**32), source.randrange(2**32), source.randrange(2**64), source.randrange(2**63))
    entry = Entry(source.randbytes(source.choice((1, 8, 68, 200))), *numbers, source.randrange(2**32))
    name = path_of(entry).rsplit("/", 1)[1]
    other = damage(name.encode(), source).decode("latin-1")
    told = parse_name(other)
    assert told is None or other != name or told._replace(key=entry.key) == entry


def damaged_object(source: random.Random) -> None:
    name = name_of(source.randbytes(source.choice((1, 8, 68, 512))))
    other = damage(name.encode(), source).decode("latin-1")
    key = key_of(other)
    assert key is None or name_of(key) == other


def damage(raw: bytes, source: random.Random) -> bytes:
    """``raw``, or something near it."""
    kind = source.randrange(6)
    at = source.randrange(len(raw))
    if kind == 0:
        return raw
    if kind == 1:
        return raw[:at]
    if kind == 2:
        return raw + source.randbytes(source.randint(1, 8))
    if kind == 3:
        return raw[:at] + source.randbytes(1) + raw[at + 1 :]
    if kind == 4:
        return raw[:at] + raw[source.randrange(len(raw)) :]
    return raw[:at] + bytes([raw[at] ^ 1 << source.randrange(8)]) + raw[at + 1 :]


if __name__ == "__main__":
    main()
