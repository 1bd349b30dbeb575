"""Plays a workload over HTTP against a running stack, on an emulated clock, and records what each client saw.

This is the measured side of every comparison; `cluster` is the predicted one. It sends real text through the real
router and reads real streams; it does not look inside the engines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from kvhearth.engine.tokens import decode, encode, output_tokens, prompt_seed
from kvhearth.planner.outcome import Served
from kvhearth.planner.workload import User, Workload

_CONNECTIONS = 1024
_READ_BYTES = 1 << 16
_LEAD_SECONDS = 1.0
"""A prompt's text is made so long before it is due: not all at once at the start, and not when it should be sent."""


@dataclass(slots=True)
class LoadRun:
    """What was served, and how late each request was sent (emulated seconds; the generator's own lag)."""

    served: list[Served] = field(default_factory=list)
    send_lags_seconds: list[float] = field(default_factory=list)

    @property
    def send_lag_seconds(self) -> float:
        """Mean of the generator's lag; 0 when nothing was sent."""
        return float(np.mean(self.send_lags_seconds)) if self.send_lags_seconds else 0.0


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How to play.

    Args:
        url: the router's (or an engine's) base URL.
        model: model name to ask for.
        time_scale: emulated seconds a wall second.
        request_timeout_seconds: wall seconds after which a request counts as failed.
        check_text: compare generated text with what the emulated engine must answer to that prompt; a difference is an
            error ("wrong text").
        api_key: bearer token, if the stack asks for one.
    """

    url: str
    model: str
    time_scale: float = 1.0
    request_timeout_seconds: float = 120.0
    check_text: bool = False
    api_key: str = ""


async def play(workload: Workload, config: LoadConfig, on_served: Callable[[Served], None] | None = None) -> LoadRun:
    """Play every user at once; returns when each turn was served or failed. A failed turn ends its conversation: the
    turns that continue it are left out.

    Never raises for what a server does: faults are `Served.error`.
    """
    run = LoadRun()
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    timeout = aiohttp.ClientTimeout(total=config.request_timeout_seconds)
    connector = aiohttp.TCPConnector(limit=_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        player = _Player(session, config, run, on_served)
        await asyncio.gather(*(player.play(user) for user in workload.users))
    return run


class _Player:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        config: LoadConfig,
        run: LoadRun,
        on_served: Callable[[Served], None] | None,
    ) -> None:
        self._session = session
        self._config = config
        self._run = run
        self._on_served = on_served
        self._begun = time.monotonic() + _LEAD_SECONDS

    def _now_ns(self) -> int:
        return int((time.monotonic() - self._begun) * self._config.time_scale * 1e9)

    async def _until(self, due_ns: int, lead_seconds: float = 0.0) -> None:
        """Wait for an emulated time, or for the wall clock to be so many seconds before it."""
        wall_seconds = (due_ns - self._now_ns()) / 1e9 / self._config.time_scale - lead_seconds
        if wall_seconds > 0:
            await asyncio.sleep(wall_seconds)

    async def play(self, user: User) -> None:
        conversation, due_ns, broken = "", user.start_ns, False
        for index, turn in enumerate(user.turns):
            if broken and turn.continues:
                continue
            due_ns += turn.delay_ns
            await self._until(due_ns, _LEAD_SECONDS)
            added = "".join(segment.text() for segment in turn.segments)
            prompt = conversation + added if turn.continues else added
            await self._until(due_ns)
            self._run.send_lags_seconds.append((self._now_ns() - due_ns) / 1e9)
            served, text = await self._request(user.name, index, due_ns, prompt, turn.output_tokens)
            self._run.served.append(served)
            if self._on_served:
                self._on_served(served)
            broken = served.error is not None
            conversation, due_ns = prompt + text, served.finished_ns

    async def _request(self, user: str, turn: int, due_ns: int, prompt: str, tokens: int) -> tuple[Served, str]:
        body = {
            "model": self._config.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        seen = _Stream()
        error: str | None = None
        engine = ""
        try:
            async with self._session.post(f"{self._config.url}/v1/completions", json=body) as response:
                engine = response.headers.get("x-kvhearth-engine", "")
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:200]}"
                else:
                    await seen.read(_events(response.content), self._now_ns)
        except (aiohttp.ClientError, TimeoutError, ValueError) as fault:
            error = f"{type(fault).__name__}: {fault}"
        text = "".join(seen.text)
        error = error or seen.fault(tokens) or self._wrong_text(prompt, tokens, text)
        now = self._now_ns()
        first = seen.first_ns or now
        served = Served(user, turn, due_ns, first, now, seen.prompt_tokens, seen.output_tokens, engine, error)
        return served, text

    def _wrong_text(self, prompt: str, tokens: int, text: str) -> str | None:
        if not self._config.check_text:
            return None
        expected = decode(output_tokens(prompt_seed(encode(prompt)), tokens))
        return None if text == expected else "wrong text"


class _Stream:
    """What one stream of server-sent events carried."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.first_ns = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.done = False

    async def read(self, events: AsyncIterator[bytes], now_ns: Callable[[], int]) -> None:
        async for event in events:
            if event == b"[DONE]":
                self.done = True
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                raise ValueError(f"error in the stream: {chunk['error']}")
            for choice in chunk.get("choices", ()):
                if choice.get("text"):
                    self.first_ns = self.first_ns or now_ns()
                    self.text.append(choice["text"])
            if usage := chunk.get("usage"):
                self.prompt_tokens, self.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def fault(self, asked_tokens: int) -> str | None:
        if not self.done:
            return "stream ended early"
        if self.output_tokens != asked_tokens:
            return f"{self.output_tokens} tokens instead of {asked_tokens}"
        return None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event, as soon as it is whole."""
    rest = b""
    while piece := await content.read(_READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
