"""The fleet and the client of the routing benchmark: emulated engines, each a process, and a player of one-turn
requests that notes when the first token came. It judges nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import statistics
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import aiohttp

from kvhearth.emulator.config import EmulatorConfig
from kvhearth.emulator.publisher import parse_kv_events_config
from kvhearth.emulator.serve import Emulator
from kvhearth.metrics import parse_exposition
from kvhearth.planner.workload import Workload
from support.routers import Setting, free_port

NAME = "m"
DEADLINE_SECONDS = 60.0
REQUEST_SECONDS = 120.0
LEAD_SECONDS = 0.5
"""A prompt's text is made so long before it is due."""

SESSION_HEADER = "x-session-id"
_PIECE_BYTES = 1 << 16


class Played(NamedTuple):
    """What a client saw: emulated seconds from when each answered request was due to its first token, what went wrong
    with the others, and how late requests were sent (emulated seconds, mean)."""

    ttft_seconds: list[float]
    faults: list[str]
    lag_seconds: float


async def play(workload: Workload, port: int, time_scale: float, *, sessions: bool) -> Played:
    """Send every request at its time, `time_scale` times as fast; returns when all are answered or have failed.

    Args:
        sessions: tell the router which conversation each belongs to, as far as the workload shows: requests that share
            their second segment (the first is often everybody's).
    """
    begun = time.monotonic() + LEAD_SECONDS
    times: list[float] = []
    faults: list[str] = []
    lags: list[float] = []

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        user = workload.users[number]
        turn = user.turns[0]
        due = begun + user.start_ns / 1e9 / time_scale
        await asyncio.sleep(due - LEAD_SECONDS - time.monotonic())
        fields = {
            "model": NAME,
            "prompt": "".join(segment.text() for segment in turn.segments),
            "max_tokens": turn.output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(fields).encode()
        headers = {"content-type": "application/json"}
        if sessions:
            headers[SESSION_HEADER] = str(turn.segments[1].seed if len(turn.segments) > 1 else turn.segments[0].seed)
        await asyncio.sleep(due - time.monotonic())
        lags.append((time.monotonic() - due) * time_scale)
        try:
            first = await _first_token(session, f"http://127.0.0.1:{port}/v1/completions", body, headers)
        except (aiohttp.ClientError, TimeoutError, ValueError) as fault:
            faults.append(f"{type(fault).__name__}: {fault}")
        else:
            times.append((first - due) * time_scale)

    limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits) as session:
        await asyncio.gather(*(one(session, number) for number in range(len(workload.users))))
    return Played(times, faults, statistics.fmean(lags))


async def _first_token(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> float:
    """Monotonic time of the first piece that has text; raises for an answer that is not a whole stream."""
    first, tail = 0.0, b""
    async with session.post(url, data=body, headers=headers) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {(await response.text())[:200]}")
        while piece := await response.content.read(_PIECE_BYTES):
            if not first and b'"text":"' in piece.replace(b'": "', b'":"'):
                first = time.monotonic()
            tail = (tail + piece)[-64:]
    if not first or not tail.rstrip().endswith(b"[DONE]"):
        raise ValueError(f"the stream ended early: {tail!r}")
    return first


class Engines:
    """The emulated engines, and what they have counted."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def counted(self, name: str) -> list[float]:
        """A counter of every engine."""
        return [sum(parse_exposition(_get(f"{url}/metrics")).get(name, {}).values()) for url in self.setting.urls]

    def lag(self) -> tuple[float, float]:
        """Emulated seconds that steps were handed out late, summed over all so far, and how many steps."""
        states = [json.loads(_get(f"{url}/emulator/state")) for url in self.setting.urls]
        return sum(state["lag_total_seconds"] for state in states), sum(state["lag_steps"] for state in states)

    def forget(self) -> None:
        """Empty every cache."""
        for url in self.setting.urls:
            _get(f"{url}/reset_prefix_cache", post=True)


@contextlib.contextmanager
def emulated(engines: int, shape: EmulatorConfig, time_scale: float) -> Iterator[Engines]:
    """Engines of this shape that answer and publish their KV events; they end with the
    block. Enter it before any thread starts: engines are forks, so that eight need the time of one to load."""
    context = multiprocessing.get_context("fork")
    pairs = [(free_port(), free_port()) for _ in range(engines)]
    processes = []
    for number, (port, events) in enumerate(pairs):
        told = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        config = replace(
            shape,
            port=port,
            engine_id=str(number),
            served_model_name=NAME,
            time_scale=time_scale,
            kv_events=parse_kv_events_config(json.dumps(told)),
        )
        process = context.Process(target=_serve, args=(config,), daemon=True)
        process.start()
        processes.append(process)
    try:
        for port, _ in pairs:
            wait_until_serving(port)
        yield Engines(Setting([f"http://127.0.0.1:{port}" for port, _ in pairs], [events for _, events in pairs]))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)
            process.kill()


def _serve(config: EmulatorConfig) -> None:
    Path("/proc/self/comm").write_text("emulator")
    Emulator(config).run()


def wait_until_serving(port: int) -> None:
    """Until a completion comes back."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    body = json.dumps({"model": NAME, "prompt": "hello", "max_tokens": 1}).encode()
    while True:
        with contextlib.suppress(OSError):
            _get(f"http://127.0.0.1:{port}/v1/completions", body)
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody serves at port {port}")
        time.sleep(0.05)


def _get(url: str, body: bytes | None = None, *, post: bool = False) -> str:
    request = urllib.request.Request(
        url, body, {"content-type": "application/json"}, method="POST" if post or body else "GET"
    )
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
        return str(response.read().decode())
