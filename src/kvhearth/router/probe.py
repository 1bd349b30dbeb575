"""Asks engines how they are, off the data path: own connections, own deadlines, no part in load or routing."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import httptools
import msgspec

from kvhearth.router.config import HealthChecks
from kvhearth.router.engines import Engine, Fleet

MAX_PAGE_BYTES = 4 * 1024 * 1024


_OUR_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors that say nothing of the engine; they count as a late answer."""


class ProbeFailed(Exception):
    """The engine did not answer as a healthy one does. ``gone``: nobody listens there any more."""

    def __init__(self, reason: str, *, gone: bool = False, timed_out: bool = False) -> None:
        self.gone = gone
        self.timed_out = timed_out
        super().__init__(reason)


class Probe:
    """Watches one engine for as long as `watch` runs."""

    def __init__(self, engine: Engine, fleet: Fleet, checks: HealthChecks, api_key: str | None) -> None:
        self._engine = engine
        self._fleet = fleet
        self._checks = checks
        self._authorization = b"" if api_key is None else b"authorization: Bearer %b\r\n" % api_key.encode()
        self._timeouts_in_a_row = 0
        self._until_models = 0

    async def watch(self) -> None:
        """Check for ever, the first time after one interval."""
        while True:
            await asyncio.sleep(self._checks.interval_seconds)
            await self.check()

    async def check(self) -> None:
        """Probe once and tell the fleet. Ends within twice the deadline."""
        engine = self._engine
        try:
            await self._get(b"/health")
            if not engine.healthy or self._until_models <= 0:
                cards = _model_cards(await self._get(b"/v1/models"))
                self._fleet.mark_up(engine, cards)
                self._until_models = self._checks.models_every
            self._until_models -= 1
            self._timeouts_in_a_row = 0
        except ProbeFailed as failure:
            self._timeouts_in_a_row += failure.timed_out
            if not failure.timed_out or self._timeouts_in_a_row >= self._checks.failures_to_down:
                unreachable = failure.gone or failure.timed_out
                self._fleet.mark_down(engine, str(failure), unreachable=unreachable)

    async def _get(self, path: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._checks.deadline_seconds):
                reader, writer = await asyncio.open_connection(self._engine.host, self._engine.port)
                try:
                    writer.write(
                        b"GET %b HTTP/1.1\r\nhost: %b\r\n%bconnection: close\r\n\r\n"
                        % (path, self._engine.host_header, self._authorization)
                    )
                    return await _read_page(reader, path.decode())
                finally:
                    writer.transport.abort()
        except TimeoutError:
            raise ProbeFailed(
                f"no answer to {path.decode()} within {self._checks.deadline_seconds} s", timed_out=True
            ) from None
        except (OSError, UnicodeError) as error:
            ours = getattr(error, "errno", None) in _OUR_FAULT
            raise ProbeFailed(f"{path.decode()}: {error}", gone=not ours, timed_out=ours) from None


class _Page:
    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_page(reader: asyncio.StreamReader, path: str) -> bytes:
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
    if status != 200:
        raise ProbeFailed(f"{path}: status {status}")
    return page.body


def _model_cards(page: bytes) -> list[dict[str, Any]]:
    try:
        cards = msgspec.json.decode(page)["data"]
        if all(isinstance(card["id"], str) for card in cards):
            return list(cards)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, RecursionError):
        pass
    raise ProbeFailed("/v1/models: not a list of models")
