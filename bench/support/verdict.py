"""What the runs of the store's benchmark come to: the table that people read and the figures of its last line."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from kvhearth.store.protocol.header import HEADER_BYTES
from kvhearth.units import format_bytes
from support.measure import LOOKUP_KEYS, MAX_CONNECTIONS, SIZES, Case, Run

Runs = dict[Case, dict[str, list[Run]]]
"""Of each case the runs of each side by its name, one a round; those of one round were made one after another."""

OURS = "kvhearth"
_PEERS = ("redis tcp", "valkey tcp")
_MEMCPY = "memcpy memory"
_MOVES = [Case(operation, nbytes, MAX_CONNECTIONS) for operation in ("get", "put") for nbytes in SIZES]
_LOOKUP = Case("lookup", 0, 1)


def summary(runs: Runs) -> dict[str, Any]:
    """The last line. Ratios are ours divided by theirs: above 1 is better for GB/s, below 1 for a lookup and for CPU.

    ``get_gbps``, ``put_gbps`` and ``cpu_seconds_per_gb`` are geometric means over both sizes, TCP, four connections.
    None: not measured.
    """
    gets, puts = _MOVES[: len(SIZES)], _MOVES[len(SIZES) :]
    ours = f"{OURS} tcp"
    tcp, uds = ([_speed_ratio(runs, case, f"{OURS} {transport}") for case in _MOVES] for transport in ("tcp", "unix"))
    ratio = {
        "tcp_geomean": _geomean(tcp),
        "tcp_worst": _worst(tcp),
        "uds_geomean": _geomean(uds),
        "shm_get": _worst([_over(runs, case, f"{OURS} shm", _MEMCPY) for case in gets]),
        "shm_put": _worst([_over(runs, case, f"{OURS} shm", _MEMCPY) for case in puts]),
        "lookup": _over(runs, _LOOKUP, ours, _best(runs, _LOOKUP, lowest=True)),
        "cpu": _geomean([_cpu_ratio(runs, case, ours) for case in _MOVES]),
    }
    return {
        "get_gbps": _rounded(_geomean([_median(runs, case, ours) for case in gets])),
        "put_gbps": _rounded(_geomean([_median(runs, case, ours) for case in puts])),
        "lookup_256_ms": _rounded(_median(runs, _LOOKUP, ours)),
        "cpu_seconds_per_gb": _rounded(_geomean([_median(runs, case, ours, cpu=True) for case in _MOVES])),
        "ratio": {name: _rounded(value) for name, value in ratio.items()},
    }


def table(runs: Runs) -> Table:
    """Medians of every case and side; CPU beside the speed where the server's was measured."""
    names = list(dict.fromkeys(name for sides in runs.values() for name in sides))
    shown = Table(title="Medians of rounds: GB/s (server CPU seconds a GB)", title_justify="left")
    shown.add_column("case", no_wrap=True)
    for name in names:
        shown.add_column(name.replace(" ", "\n", 1) if name.count(" ") == 1 else name, justify="right")
    for case, sides in runs.items():
        shown.add_row(_label(case), *[_cell(case, sides.get(name)) for name in names])
    return shown


def _label(case: Case) -> str:
    if case.operation.startswith("lookup"):
        return f"{LOOKUP_KEYS} keys, ms" + (f", {MAX_CONNECTIONS} busy" if case.operation.endswith("busy") else "")
    return f"{case.operation} {format_bytes(case.nbytes - HEADER_BYTES)}, {case.connections} conn"


def _cell(case: Case, found: Sequence[Run] | None) -> str:
    if not found:
        return ""
    figure = statistics.median(run.figure for run in found)
    if case.operation.startswith("lookup"):
        return f"{figure:.3f}"
    cpu = statistics.median(run.cpu for run in found)
    return f"{figure:.2f} ({cpu:.2f})" if cpu else f"{figure:.2f}"


def _speed_ratio(runs: Runs, case: Case, ours: str) -> float | None:
    return _over(runs, case, ours, _best(runs, case, lowest=False))


def _cpu_ratio(runs: Runs, case: Case, ours: str) -> float | None:
    return _over(runs, case, ours, _best(runs, case, lowest=True, cpu=True), cpu=True)


def _best(runs: Runs, case: Case, *, lowest: bool, cpu: bool = False) -> str | None:
    """The better of Redis and Valkey over TCP, by its median."""
    medians = {name: _median(runs, case, name, cpu=cpu) for name in _PEERS}
    there = {name: median for name, median in medians.items() if median is not None}
    if not there:
        return None
    return (min if lowest else max)(there, key=lambda name: there[name])


def _over(runs: Runs, case: Case, ours: str, theirs: str | None, *, cpu: bool = False) -> float | None:
    """Median over the rounds of ours divided by theirs in the same round."""
    sides = runs.get(case, {})
    if theirs is None or not sides.get(ours) or not sides.get(theirs):
        return None
    pairs = zip(sides[ours], sides[theirs], strict=True)
    return statistics.median(a.cpu / b.cpu if cpu else a.figure / b.figure for a, b in pairs)


def _median(runs: Runs, case: Case, name: str, *, cpu: bool = False) -> float | None:
    found = runs.get(case, {}).get(name)
    return statistics.median(run.cpu if cpu else run.figure for run in found) if found else None


def _geomean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    there = [value for value in known if value is not None]
    return statistics.geometric_mean(there) if there and len(there) == len(known) else None


def _worst(values: Iterable[float | None]) -> float | None:
    known = list(values)
    there = [value for value in known if value is not None]
    return min(there) if there and len(there) == len(known) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
