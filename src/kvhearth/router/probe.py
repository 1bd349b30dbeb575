"""Asks engines how they are, off the data path: own connections, own deadlines, no part in load or routing."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

from kvhearth.router.config import HealthChecks
from kvhearth.router.engines import Engine
from kvhearth.router.fleet import Fleet

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 4 * 1024 * 1024
MOST_REPORTED = 1_000_000_000

_LOAD = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{([^}\n]*)\})?[ \t]+([^\s]{1,40})", re.MULTILINE)
_RANK = re.compile(rb'(?:^|,)engine="([^"]{0,20})"')

_OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors that say nothing of the engine."""


class ProbeFailed(Exception):
    """The engine did not answer as a healthy one does. ``gone``: nobody listens there any more; ``ours``: this side
    could not ask."""

    def __init__(self, reason: str, *, gone: bool = False, timed_out: bool = False, ours: bool = False) -> None:
        self.gone = gone
        self.timed_out = timed_out
        self.ours = ours
        super().__init__(reason)


class Probe:
    """Watches one engine for as long as `watch` runs."""

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        checks: HealthChecks,
        api_key: str | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._engine = engine
        self._fleet = fleet
        self._checks = checks
        self._authorization = _authorization(api_key)
        self._timeouts_in_a_row = 0
        self._until_models = 0
        self._complained = False

    async def watch(self) -> None:
        """Check for ever, the first time after one interval."""
        while True:
            await asyncio.sleep(self._checks.interval_seconds)
            try:
                await self.check()
            except Exception:  # or nobody would look at this engine ever again
                log.exception("the health of engine %s cannot be checked", self._engine.name)

    async def check(self) -> None:
        """Probe once and tell the fleet. Ends within twice the deadline."""
        engine = self._engine
        try:
            await self._get(b"/health")
            if not engine.healthy or self._until_models <= 0:
                cards = _model_cards(await self._get(b"/v1/models"))
                self._fleet.mark_up(engine, cards, self._now())
                self._until_models = self._checks.models_every
            self._until_models -= 1
            self._timeouts_in_a_row = 0
            self._complained = False
        except ProbeFailed as failure:
            if failure.ours:
                if not self._complained:
                    log.warning("engine %s is taken for what it was, for it cannot be asked: %s", engine.name, failure)
                    self._complained = True
                return
            self._timeouts_in_a_row += failure.timed_out
            if not failure.timed_out or self._timeouts_in_a_row >= self._checks.failures_to_down:
                unreachable = failure.gone or failure.timed_out
                self._fleet.mark_down(engine, str(failure), unreachable=unreachable)

    async def _get(self, path: bytes) -> bytes:
        return await get_page(self._engine, path, self._checks.deadline_seconds, self._authorization)


class LoadProbe:
    """Reads from one engine's metrics page how many requests it has, for as long as `watch` runs.

    Args:
        backlog: requests that may wait at the engine before it counts as full.
        failed: called with the engine's name each time its load is not to be had.
    """

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        checks: HealthChecks,
        api_key: str | None,
        backlog: int,
        failed: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._fleet = fleet
        self._backlog = backlog
        self._checks = checks
        self._authorization = _authorization(api_key)
        self._failed = failed
        self._failures_in_a_row = 0

    async def watch(self) -> None:
        """Read for ever, at once and then after each interval."""
        while True:
            try:
                if self._engine.healthy:
                    await self.read()
            except Exception:  # or nobody would read this engine's load ever again
                log.exception("the load of engine %s cannot be read", self._engine.name)
            await asyncio.sleep(self._checks.interval_seconds)

    async def read(self) -> None:
        """Read once and tell the engine's targets; after several failures in a row they count as telling nothing."""
        engine = self._engine
        try:
            load = read_load(await get_page(engine, b"/metrics", self._checks.deadline_seconds, self._authorization))
        except ProbeFailed:
            self._failed(engine.name)
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= self._checks.failures_to_down:
                load = {}
            else:
                return
        else:
            self._failures_in_a_row = 0
        for target in engine.targets:
            if target.rank is None:
                ranks = list(load.values())
                target.reported(sum(running for running, _ in ranks), sum(waiting for _, waiting in ranks))
            else:
                target.reported(*load.get(str(target.rank), (0, 0)))
        self._fleet.reported(engine, sum(target.waiting for target in engine.targets), self._backlog)


def read_load(page: bytes) -> dict[str, tuple[int, int]]:
    """Requests (running, waiting) by vLLM's label ``engine``, summed over models.

    Raises:
        ProbeFailed: the page has neither ``vllm:num_requests_running`` nor ``vllm:num_requests_waiting``.
    """
    load: dict[str, tuple[int, int]] = {}
    for state, labels, value in _LOAD.findall(page):
        rank = _RANK.search(labels)
        name = rank[1].decode("latin-1") if rank else "0"
        running, waiting = load.get(name, (0, 0))
        try:
            count = min(max(int(float(value)), 0), MOST_REPORTED)
        except (ValueError, OverflowError):
            continue
        load[name] = (running + count, waiting) if state == b"running" else (running, waiting + count)
    if not load:
        raise ProbeFailed("/metrics: no vllm:num_requests_running or waiting")
    return load


def _authorization(api_key: str | None) -> bytes:
    return b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()


async def get_page(engine: Engine, path: bytes, deadline_seconds: float, authorization: bytes) -> bytes:
    """Body of an engine's page, over a connection of its own; raises ProbeFailed for all but status 200 in time."""
    name = path.decode()
    try:
        async with asyncio.timeout(deadline_seconds):
            reader, writer = await asyncio.open_connection(engine.host, engine.port, ssl=engine.ssl)
            try:
                head = b"GET %b HTTP/1.1\r\nhost: %b\r\n%bconnection: close\r\n\r\n"
                writer.write(head % (path, engine.host_header, authorization))
                status, body = await _read_page(reader, name)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise ProbeFailed(f"no answer to {name} within {deadline_seconds} s", timed_out=True) from None
    except (OSError, UnicodeError) as error:
        ours = getattr(error, "errno", None) in _OUR_FAULT
        raise ProbeFailed(f"{name}: {error}", gone=not ours, ours=ours) from None
    if status != 200:
        raise ProbeFailed(f"{name}: status {status}")
    return body


class _Page:
    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_page(reader: asyncio.StreamReader, path: str) -> tuple[int, bytes]:
    page = _Page()
    parser = httptools.HttpResponseParser(page)
    received_bytes = 0
    while not page.complete and (data := await reader.read(65536)):
        received_bytes += len(data)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ProbeFailed(f"{path}: not HTTP ({error})") from None
        if received_bytes > MAX_PAGE_BYTES:
            raise ProbeFailed(f"{path}: answer above {MAX_PAGE_BYTES} bytes")
    status = parser.get_status_code()
    if status == 0:
        raise ProbeFailed(f"{path}: connection closed without an answer", gone=True)
    return status, page.body


def _model_cards(page: bytes) -> list[dict[str, Any]]:
    try:
        cards = msgspec.json.decode(page)["data"]
        if all(isinstance(card["id"], str) for card in cards):
            return list(cards)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        pass
    raise ProbeFailed("/v1/models: not a list of models")
