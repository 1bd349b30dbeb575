"""At which HBM utilisation does a mode begin to pay? The workload at rising concurrency, each mode against none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from kvhearth.cost.verdict import MARGIN, gain
from kvhearth.planner.cluster import ClusterConfig, Simulated, simulate
from kvhearth.planner.workload import Workload

FRACTIONS = (0.15, 0.4, 0.7)
"""Shares of the workload's users that are simulated beside the whole."""


class Level(NamedTuple):
    """One concurrency: users, HBM utilisation without offloading (0..1, mean over busy time), gain by mode."""

    users: int
    hbm_usage: float
    gains: dict[str, float]


class Curve(NamedTuple):
    """Levels by rising concurrency, each mode's break-even utilisation (None: it pays at no level tried), and the runs
    of the whole workload by mode."""

    levels: list[Level]
    break_even: dict[str, float | None]
    full: dict[str, Simulated]


def sweep(
    workload: Workload,
    modes: Mapping[str, ClusterConfig],
    fractions: Sequence[float] = FRACTIONS,
    on_run: Callable[[], None] | None = None,
) -> Curve:
    """Simulate every mode at every share of the users (the whole workload always among them), one run a core at a time.

    Args:
        workload: the full workload.
        modes: configuration by mode; must hold ``none``.
        fractions: shares of the users in (0, 1).
        on_run: called after each run, from this thread; there are `runs_of` of them.

    Raises:
        UserError: what `simulate` refuses.
    """
    counts = _levels(workload, fractions)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(simulate, workload.with_users(users), config): (users, mode)
            for users in reversed(counts)  # the longest first, so that none is left running alone at the end
            for mode, config in modes.items()
        }
        runs: dict[tuple[int, str], Simulated] = {}
        for future in as_completed(futures):
            runs[futures[future]] = future.result()
            if on_run:
                on_run()
    levels = [_level(users, {mode: runs[users, mode] for mode in modes}) for users in counts]
    full = {mode: runs[counts[-1], mode] for mode in modes}
    return Curve(levels, {mode: break_even(levels, mode) for mode in modes if mode != "none"}, full)


def runs_of(workload: Workload, modes: Mapping[str, ClusterConfig], fractions: Sequence[float] = FRACTIONS) -> int:
    """How many runs `sweep` makes."""
    return len(modes) * len(_levels(workload, fractions))


def _levels(workload: Workload, fractions: Sequence[float]) -> list[int]:
    return sorted({max(1, round(len(workload.users) * fraction)) for fraction in (*fractions, 1.0)})


def _level(users: int, runs: Mapping[str, Simulated]) -> Level:
    throughput = {mode: run.outcome.throughput_tokens_per_second for mode, run in runs.items()}
    gains = {mode: gain(value, throughput["none"]) for mode, value in throughput.items() if mode != "none"}
    return Level(users, runs["none"].hbm_usage_mean, gains)


def break_even(levels: Sequence[Level], mode: str, margin: float = MARGIN) -> float | None:
    """Lowest HBM utilisation from which ``mode`` gains at least ``margin`` at every higher level tried.

    Between the last level that does not pay and the first that does, the point is interpolated linearly.
    """
    paying = len(levels)
    while paying and levels[paying - 1].gains[mode] >= margin:
        paying -= 1
    if paying == len(levels):
        return None
    if paying == 0:
        return levels[0].hbm_usage
    below, above = levels[paying - 1], levels[paying]
    share = (margin - below.gains[mode]) / (above.gains[mode] - below.gains[mode])
    return below.hbm_usage + share * (above.hbm_usage - below.hbm_usage)
