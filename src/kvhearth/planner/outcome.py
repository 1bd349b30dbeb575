"""What a run of a workload came to, whether it was simulated or measured: one shape, one arithmetic for both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from kvhearth.engine.ports import Counters
from kvhearth.planner.workload import Slo

STEADY_SHARE = 0.95
"""Rates leave out the requests that are served last: when users have left one by one, how long the very last one takes
says little about the engines, and differs most from run to run."""

SOURCES = ("hbm", "dram", "store", "compute")


class Served(NamedTuple):
    """One request as its client saw it, in emulated nanoseconds since the run began. ``error`` is None when whole."""

    user: str
    turn: int
    due_ns: int
    first_token_ns: int
    finished_ns: int
    prompt_tokens: int
    output_tokens: int
    engine: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of one run. Times in emulated seconds.

    ``throughput_tokens_per_second`` is prompt plus generated tokens completed in a second, over the time until
    `STEADY_SHARE` of the requests are served. ``goodput_requests_per_second`` counts, over the same time, requests
    inside the workload's `Slo`. ``reprefills_avoided`` and the token sources are the engines' own counts
    (`engine.ports.Counters`) over the whole run, summed.
    """

    requests: int
    errors: int
    throughput_tokens_per_second: float
    goodput_requests_per_second: float
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    preemptions: int
    reprefill_tokens: int
    reprefills_avoided: int
    reprefill_avoided_tokens: int
    prompt_tokens_by_source: dict[str, int]
    makespan_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Plain values for a report."""
        return asdict(self)


def summarise(served: Sequence[Served], counters: Iterable[Counters], slo: Slo) -> Outcome:
    """Fold the clients' view and the engines' counts into one `Outcome`.

    Time runs from the first request due; TTFT from when a request was due, so that a client that sends late cannot
    flatter the engine.
    """
    whole = sorted((s for s in served if s.error is None), key=lambda s: s.finished_ns)
    steady = whole[: ceil(STEADY_SHARE * len(whole))]
    total = total_counters(counters)
    begin = min((s.due_ns for s in served), default=0)
    makespan = (whole[-1].finished_ns - begin) / 1e9 if whole else 0.0
    steady_seconds = (steady[-1].finished_ns - begin) / 1e9 if steady else 0.0
    ttft = np.array([(s.first_token_ns - s.due_ns) / 1e9 for s in whole]) if whole else np.zeros(1)
    good = sum(1 for s in steady if within(s, slo))
    tokens = sum(s.prompt_tokens + s.output_tokens for s in steady)
    return Outcome(
        requests=len(served),
        errors=len(served) - len(whole),
        throughput_tokens_per_second=tokens / steady_seconds if steady_seconds else 0.0,
        goodput_requests_per_second=good / steady_seconds if steady_seconds else 0.0,
        ttft_p50_seconds=float(np.percentile(ttft, 50)),
        ttft_p99_seconds=float(np.percentile(ttft, 99)),
        preemptions=total.preemptions,
        reprefill_tokens=total.reprefill_tokens,
        reprefills_avoided=total.reprefills_avoided,
        reprefill_avoided_tokens=total.reprefill_avoided_tokens,
        prompt_tokens_by_source={source: getattr(total, f"prompt_tokens_{source}") for source in SOURCES},
        makespan_seconds=makespan,
    )


def within(served: Served, slo: Slo) -> bool:
    """Whether a whole request kept the service level: first token in time, and the mean time of those after it."""
    if (served.first_token_ns - served.due_ns) / 1e9 > slo.ttft_seconds:
        return False
    after_first = served.output_tokens - 1
    return after_first < 1 or (served.finished_ns - served.first_token_ns) / 1e9 / after_first <= slo.tpot_seconds


def total_counters(counters: Iterable[Counters]) -> Counters:
    """Field by field sum."""
    total = Counters()
    for one in counters:
        for name, value in asdict(one).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def counters_from(values: Mapping[str, int]) -> Counters:
    """Counters as an engine's state page shows them; names it does not know are ignored."""
    return Counters(**{name: values[name] for name in asdict(Counters()) if name in values})
