"""Measures a workload on a real stack: starts it, plays the workload through its router, reads the engines' counters.

The stack's engines keep emulated time. When this machine cannot keep up, the figures would be bent; so the run watches
how far engines and clients lag behind, and starts over with a slower clock rather than report them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import aiohttp

from kvhearth.control.local import LocalStack
from kvhearth.errors import UserError
from kvhearth.planner.load import LoadConfig, LoadRun, play
from kvhearth.planner.outcome import Outcome, Served, counters_from, summarise
from kvhearth.planner.workload import Workload
from kvhearth.stack import Stack

SLOWEST_TIME_SCALE = 0.25
_WATCH_SECONDS = 1.0
_HOPELESS = 3.0
"""Times the limit at which a run is not played to its end."""
_TELLING_STEPS = 500
"""Steps before which that is not asked: early on, one slow moment weighs much."""
_GREATEST_STEP_DOWN, _LEAST_STEP_DOWN = 0.25, 0.75
"""How much slower the next try is, at most and at least."""
_STATE_TIMEOUT_SECONDS = 10.0
_REQUEST_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Watch:
    """What a measurement tells of itself while it runs; all are called from the measuring thread.

    Args:
        on_served: a request was served (its error, if any, is in it).
        on_restart: the run begins again with this time scale, because lag (emulated seconds) went past the limit.
    """

    on_served: Callable[[Served], None] = lambda served: None
    on_restart: Callable[[float, float], None] = lambda time_scale, lag_seconds: None


@dataclass(frozen=True, slots=True)
class Measured:
    """One run that kept up: its figures, the clock's speed, and the lag that is in them (emulated seconds): by how much
    tokens were handed out late, or requests sent late, on average."""

    outcome: Outcome
    served: list[Served]
    time_scale: float
    lag_seconds: float


class _LaggingError(Exception):
    def __init__(self, lag_seconds: float) -> None:
        super().__init__(lag_seconds)
        self.lag_seconds = lag_seconds


def measure(
    stack_at: Callable[[float], Stack],
    workload: Workload,
    *,
    time_scale: float,
    lag_limit_seconds: float,
    watch: Watch = Watch(),
) -> Measured:
    """Play ``workload`` on a fresh stack.

    Args:
        stack_at: the stack to start, for a time scale.
        time_scale: first speed tried, in emulated seconds a wall second; lowered after each run that lags.
        lag_limit_seconds: mean lag in emulated seconds that the figures can bear.

    Raises:
        UserError: the stack does not start, or this machine cannot keep up even at `SLOWEST_TIME_SCALE`.
    """
    while True:
        try:
            return _once(stack_at(time_scale), workload, time_scale, lag_limit_seconds, watch)
        except _LaggingError as lagging:
            slower = time_scale * max(
                _GREATEST_STEP_DOWN, min(_LEAST_STEP_DOWN, lag_limit_seconds / lagging.lag_seconds)
            )
            if slower < SLOWEST_TIME_SCALE:
                raise UserError(
                    f"this machine lags {lagging.lag_seconds:.3f} emulated seconds behind at scale {time_scale:.2f}",
                    where="time scale",
                    remedy="free the machine, or play a smaller workload",
                ) from None
            time_scale = slower
            watch.on_restart(time_scale, lagging.lag_seconds)


def _once(stack: Stack, workload: Workload, time_scale: float, lag_limit_seconds: float, watch: Watch) -> Measured:
    with LocalStack(stack) as running:
        running.wait_ready()
        pool = stack.pools[0]
        config = LoadConfig(
            running.router_url,
            pool.served_model_name or pool.model,
            time_scale,
            request_timeout_seconds=_REQUEST_TIMEOUT_SECONDS,
            check_text=True,
        )
        urls = list(running.engine_urls.values())
        run, states, lag = asyncio.run(_play_watched(workload, config, urls, lag_limit_seconds, watch))
    counters = [counters_from(state["counters"]) for state in states]
    return Measured(summarise(run.served, counters, workload.slo), run.served, time_scale, lag)


async def _play_watched(
    workload: Workload, config: LoadConfig, urls: list[str], lag_limit_seconds: float, watch: Watch
) -> tuple[LoadRun, list[dict[str, Any]], float]:
    """Play, and give up as soon as an engine lags hopelessly behind. Gives the run, the engines' states, the lag."""
    playing = asyncio.create_task(play(workload, config, watch.on_served))
    timeout = aiohttp.ClientTimeout(total=_STATE_TIMEOUT_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            done, _ = await asyncio.wait({playing}, timeout=_WATCH_SECONDS)
            states = [await _state(session, url) for url in urls]
            lag = fmean(_lag(state) for state in states)
            if done:
                run = playing.result()
                lag = max(lag, run.send_lag_seconds)
                if lag > lag_limit_seconds:
                    raise _LaggingError(lag)
                return run, states, lag
            telling = min(state["lag_steps"] for state in states) >= _TELLING_STEPS
            if telling and lag > _HOPELESS * lag_limit_seconds:
                playing.cancel()
                await asyncio.wait({playing})
                raise _LaggingError(lag)


async def _state(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/emulator/state") as response:
        state: dict[str, Any] = await response.json()
        return state


def _lag(state: dict[str, Any]) -> float:
    """How late a request's tokens come on average: steps handed out late, and the real store waited for."""
    handed_out = float(state["lag_total_seconds"]) / max(1, int(state["lag_steps"]))
    return handed_out + float(state["store_read_lag_seconds"]) / max(1, int(state["counters"]["requests_finished"]))
