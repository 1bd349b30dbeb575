"""What becomes of a fleet that is asked for three times what it can do, by a greedy tenant and a modest one.

    python bench/overload.py [--quick] [--policy least-loaded] [--seed 1]

Two emulated engines (an 8B model on an H100 each, as fast as the clock, eight requests running at once) stand behind
`kvhearth router serve`. What they can do is measured first, with a bounded number of clients that each wait for their
answer. Then requests arrive at the times of a Poisson process, whether or not earlier ones were answered:

| phase | of capacity | greedy | modest |
| --- | --- | --- | --- |
| before | 0.5 | 0.25 | 0.25 |
| peak | 1 | 0.5 | 0.5 |
| overload | 3 | 2.5 | 0.5 |
| after | 0.5 | 0.25 | 0.25 |

Refused requests are not sent again. A request is good when its answer is whole and its first token came within the
SLO: the longest wait in the router's queue, and what a full engine adds.

- `goodput_ratio`: good answers a second under overload over those at the peak (at least 0.9).
- `modest_tenant_share`: of what the modest tenant asked for during overload, which is its fair share, the part that was
  answered well (at least 0.9).
- `admitted_ttft_p99_seconds`: of requests of the overload that were answered with 200 (at most the SLO).
- `recovery_seconds`: from the end of the overload until a second begins of whose requests the 99th percentile of times
  to first token, refused ones counted as infinite, is at most 1.5 times what it was before (at most 10: a queue of
  five seconds is gone after ten while requests for half of the capacity keep coming).

Exit code 1 when one is missed. --quick takes about 50 s, the whole about two minutes; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from support.overload import Answer, Clients, Phase, arrivals, goodput, percentile, recovery_seconds, tenants_file
from support.routers import ours, running
from support.routing_load import Engines, emulated

from kvhearth.emulator.config import EmulatorConfig
from kvhearth.routing.registry import POLICY_NAMES

ENGINES = 2
RUNNING = 8
SHAPE = EmulatorConfig(model="llama-3.1-8b", gpu="h100-sxm", max_num_seqs=RUNNING, stream_interval=16)
BACKLOG = 8
QUEUE_SECONDS = 5.0
NORMAL_TTFT_SECONDS = 1.5
"""Of a request that a full engine takes: half a second behind `BACKLOG` others, of which it tells only now and then."""

SLO_SECONDS = QUEUE_SECONDS + NORMAL_TTFT_SECONDS
GREEDY, MODEST = TENANTS = ("greedy", "modest")
SETTLE_SECONDS = 2.0
"""Of a phase, before its goodput counts."""

RECOVERED = 1.5
LEAST_GOODPUT_RATIO, LEAST_SHARE, MOST_RECOVERY_SECONDS = 0.9, 0.9, 10.0


class Seconds(NamedTuple):
    """How long each phase is."""

    capacity: float
    before: float
    peak: float
    overload: float
    after: float


WHOLE, QUICK = Seconds(12, 15, 30, 30, 20), Seconds(6, 5, 10, 12, 12)


class Figures(NamedTuple):
    """The last line."""

    goodput_ratio: float
    modest_tenant_share: float
    admitted_ttft_p99_seconds: float
    recovery_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter phases: about 50 s in all")
    parser.add_argument("--policy", choices=POLICY_NAMES, default="least-loaded")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    seconds = QUICK if options.quick else WHOLE
    with emulated(ENGINES, SHAPE, 1.0) as engines, tempfile.TemporaryDirectory() as folder:
        path, keys = tenants_file(Path(folder), TENANTS)
        system = ours(engines.setting, options.policy)
        words = ["--tenants-file", str(path), "--queue-wait-seconds", str(QUEUE_SECONDS)]
        words += ["--max-waiting-requests", "1024", "--engine-backlog", str(BACKLOG)]
        with running([*system.command, *words]) as router:
            clients = Clients(system.port, keys, random.Random(options.seed))
            good = asyncio.run(measure(clients, router, engines, seconds, random.Random(options.seed)))
    sys.exit(0 if good else 1)


async def measure(
    clients: Clients, router: subprocess.Popen[bytes], engines: Engines, seconds: Seconds, rng: random.Random
) -> bool:
    """Find the capacity, play all phases, report; whether everything is as it should be."""
    await clients.ready(router)
    capacity = await clients.closed(MODEST, ENGINES * (RUNNING + BACKLOG // 2), seconds.capacity)
    phases = [
        Phase("before", seconds.before, {GREEDY: 0.25 * capacity, MODEST: 0.25 * capacity}),
        Phase("peak", seconds.peak, {GREEDY: 0.5 * capacity, MODEST: 0.5 * capacity}),
        Phase("overload", seconds.overload, {GREEDY: 2.5 * capacity, MODEST: 0.5 * capacity}),
        Phase("after", seconds.after, {GREEDY: 0.25 * capacity, MODEST: 0.25 * capacity}),
    ]
    late_before, steps_before = engines.lag()
    answers = await clients.open(arrivals(phases, rng))
    late, steps = engines.lag()
    lags = (
        statistics.fmean(answer.sent - answer.due for answer in answers),
        (late - late_before) / (steps - steps_before),
    )
    found = judge(answers, seconds)
    report(phases, answers, capacity, lags)
    good = verdict(found)
    print(json.dumps({name: _finite(value) for name, value in found._asdict().items()}))
    return good


def judge(answers: Sequence[Answer], seconds: Seconds) -> Figures:
    """The four figures of a run."""
    peak, overload, after, end = (sum(seconds[1:phases]) for phases in (2, 3, 4, 5))
    at_peak = goodput(answers, peak + SETTLE_SECONDS, overload, SLO_SECONDS)
    in_overload = goodput(answers, overload + SETTLE_SECONDS, after, SLO_SECONDS)
    asked = [answer for answer in answers if overload <= answer.due < after]
    modest = [answer.ttft_seconds <= SLO_SECONDS for answer in asked if answer.tenant == MODEST]
    level = percentile([answer.ttft_seconds for answer in answers if answer.due < peak], 0.99)
    return Figures(
        in_overload / at_peak if at_peak else 0.0,
        statistics.fmean(modest),
        percentile([answer.ttft_seconds for answer in asked if answer.status == 200], 0.99),
        recovery_seconds(answers, after, end, RECOVERED * level),
    )


def report(phases: Sequence[Phase], answers: Sequence[Answer], capacity: float, lags: tuple[float, float]) -> None:
    """A table of phases and tenants, and how late client and engines were."""
    title = f"{capacity:.1f} requests/s is what {ENGINES} engines can do; SLO: first token within {SLO_SECONDS:.1f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("phase")
    table.add_column("tenant")
    for column in ("asked/s", "good/s", "200", "429", "503", "other", "TTFT p50 s", "p99 s"):
        table.add_column(column, justify="right")
    begun = 0.0
    for phase in phases:
        for tenant in TENANTS:
            of_tenant = [answer for answer in answers if answer.tenant == tenant]
            asked = [answer for answer in of_tenant if begun <= answer.due < begun + phase.seconds]
            statuses = Counter(answer.status for answer in asked)
            counts = [statuses.pop(status, 0) for status in (200, 429, 503)]
            times = [answer.ttft_seconds for answer in asked if answer.status == 200]
            rates = (len(asked) / phase.seconds, goodput(of_tenant, begun, begun + phase.seconds, SLO_SECONDS))
            table.add_row(
                phase.name,
                tenant,
                *(f"{rate:.1f}" for rate in rates),
                *(str(count) for count in (*counts, statuses.total())),
                *(f"{percentile(times, share):.3f}" for share in (0.5, 0.99)),
            )
        begun += phase.seconds
    Console(width=120).print(table)
    print(f"mean lag: client {lags[0] * 1e3:.1f} ms a request, engines {lags[1] * 1e3:.1f} ms a step")


def verdict(found: Figures) -> bool:
    """Whether each figure is what it should be, in words too."""
    checks = [
        (
            found.goodput_ratio >= LEAST_GOODPUT_RATIO,
            f"goodput under overload: {found.goodput_ratio:.2f} of the peak's",
        ),
        (
            found.modest_tenant_share >= LEAST_SHARE,
            f"the modest tenant got {found.modest_tenant_share:.1%} of its share",
        ),
        (
            found.admitted_ttft_p99_seconds <= SLO_SECONDS,
            f"TTFT p99 {found.admitted_ttft_p99_seconds:.2f} s if admitted",
        ),
        (
            found.recovery_seconds <= MOST_RECOVERY_SECONDS,
            f"as before {found.recovery_seconds:.1f} s after the overload",
        ),
    ]
    for good, words in checks:
        print(f"{'ok    ' if good else 'MISSED'} {words}")
    return all(good for good, _ in checks)


def _finite(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _end(number: int, _frame: object) -> None:
    """SIGTERM unwinds as Ctrl-C does, so that engines and router end."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
