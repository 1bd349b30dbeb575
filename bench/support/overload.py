"""Two tenants' requests at Poisson times through a router, and what came of each. It judges nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
import yaml

from kvhearth.planner.workload import Segment
from support.routing_load import NAME

PROMPT_TOKENS = (256, 768)
OUTPUT_TOKENS = (32, 96)
REQUEST_SECONDS = 60.0
READY_SECONDS = 60.0
_PIECE_BYTES = 1 << 16


class Phase(NamedTuple):
    """A stretch of offered load: requests a second of each tenant."""

    name: str
    seconds: float
    rates: Mapping[str, float]


class Arrival(NamedTuple):
    """A request of a tenant, and when it is due, in seconds from the beginning."""

    tenant: str
    due: float


class Answer(NamedTuple):
    """What came of a request; times in seconds from the beginning.

    Attributes:
        sent: when the client got round to it.
        status: of HTTP; 0 when there was no whole answer.
        first: when the first token came; None where none did.
        ended: when the answer was whole, or the request had failed.
    """

    tenant: str
    due: float
    sent: float
    status: int
    first: float | None
    ended: float

    @property
    def ttft_seconds(self) -> float:
        """From when it was due to its first token; infinite where none came or the answer was not whole."""
        return self.first - self.due if self.first is not None and self.status == 200 else float("inf")


def arrivals(phases: Sequence[Phase], rng: random.Random) -> list[Arrival]:
    """Arrivals of every tenant in one phase after the other, in order of time: of a Poisson process, but always as many
    as it has on average, so that two runs offer the same load."""
    due = []
    begun = 0.0
    for phase in phases:
        for tenant, rate in phase.rates.items():
            count = round(rate * phase.seconds)
            due += [Arrival(tenant, begun + rng.uniform(0, phase.seconds)) for _ in range(count)]
        begun += phase.seconds
    return sorted(due, key=lambda arrival: arrival.due)


class Clients:
    """Sends requests to one router, each with its tenant's key. No two prompts have a beginning in common."""

    def __init__(self, port: int, keys: Mapping[str, str], rng: random.Random) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._keys = keys
        self._rng = rng
        self._made = 0

    async def ready(self, router: subprocess.Popen[bytes]) -> None:
        """Until each tenant's request is answered; raises RuntimeError when the router has ended, or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        async with _session() as session:
            for tenant in self._keys:
                while (await self._ask(session, Arrival(tenant, 0.0), time.monotonic())).status != 200:
                    if router.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{router.args!r} does not answer {tenant}")
                    await asyncio.sleep(0.1)

    async def closed(self, tenant: str, at_once: int, seconds: float) -> float:
        """Keep up to so many requests going; returns how many were answered a second, over the last two thirds."""
        begun = time.monotonic()
        answers: list[Answer] = []

        async def client(session: aiohttp.ClientSession, number: int) -> None:
            await asyncio.sleep(number / at_once * seconds / 3)
            while (now := time.monotonic() - begun) < seconds:
                answers.append(await self._ask(session, Arrival(tenant, now), begun))

        async with _session() as session:
            await asyncio.gather(*(client(session, number) for number in range(at_once)))
        answered = sum(answer.status == 200 and seconds / 3 <= answer.ended < seconds for answer in answers)
        return answered / (seconds * 2 / 3)

    async def open(self, due: Sequence[Arrival]) -> list[Answer]:
        """Send every request when it is due, whatever became of those before; returns when all are answered."""
        begun = time.monotonic()
        tasks = []
        async with _session() as session, asyncio.TaskGroup() as group:
            for arrival in due:
                await asyncio.sleep(begun + arrival.due - time.monotonic())
                tasks.append(group.create_task(self._ask(session, arrival, begun)))
        return [task.result() for task in tasks]

    def _body(self) -> bytes:
        self._made += 1
        fields = {
            "model": NAME,
            "prompt": Segment(self._made, self._rng.randint(*PROMPT_TOKENS)).text(),
            "max_tokens": self._rng.randint(*OUTPUT_TOKENS),
            "ignore_eos": True,
            "stream": True,
        }
        return json.dumps(fields).encode()

    async def _ask(self, session: aiohttp.ClientSession, arrival: Arrival, begun: float) -> Answer:
        headers = {"content-type": "application/json"}
        if key := self._keys[arrival.tenant]:
            headers["authorization"] = f"Bearer {key}"
        body = self._body()
        sent = time.monotonic() - begun
        status, first, tail = 0, None, b""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(self._url, data=body, headers=headers) as response:
                while piece := await response.content.read(_PIECE_BYTES):
                    if first is None and b'"text":"' in piece.replace(b'": "', b'":"'):
                        first = time.monotonic() - begun
                    tail = (tail + piece)[-64:]
                whole = response.status != 200 or (first is not None and tail.rstrip().endswith(b"[DONE]"))
                status = response.status if whole else 0
        return Answer(arrival.tenant, arrival.due, sent, status, first, time.monotonic() - begun)


def tenants_file(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """A router's file of tenants that are alike but for their keys, and these keys."""
    keys = {name: secrets.token_hex(16) for name in names}
    path = folder / "tenants.yaml"
    digests = {name: {"keys": [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"]} for name, key in keys.items()}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        yaml.safe_dump({"tenants": digests}, file)
    return path, keys


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of values does not exceed; NaN for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def goodput(answers: Sequence[Answer], since: float, until: float, slo_seconds: float) -> float:
    """Whole answers a second in a stretch of time whose first token came within the SLO."""
    good = sum(since <= answer.ended < until and answer.ttft_seconds <= slo_seconds for answer in answers)
    return good / (until - since)


def windows(start: float, end: float, step: float) -> Iterator[tuple[float, float]]:
    """Seconds that slide by a step."""
    for number in range(max(0, int((end - 1 - start) / step) + 1)):
        yield start + number * step, start + number * step + 1


def recovery_seconds(answers: Sequence[Answer], since: float, until: float, level_seconds: float) -> float:
    """From `since` to the beginning of the first sliding second whose requests' TTFT p99 is at the level, where those
    that were refused count as never answered; infinite where there is none."""
    for start, end in windows(since, until, 0.1):
        times = [answer.ttft_seconds for answer in answers if start <= answer.due < end]
        if times and percentile(times, 0.99) <= level_seconds:
            return start - since
    return float("inf")


def _session() -> aiohttp.ClientSession:
    limits = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)
