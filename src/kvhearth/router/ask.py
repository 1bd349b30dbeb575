"""Asks an engine something on the router's own account, over the connections that requests use too."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import msgspec

from kvhearth.router.upstream import UpstreamConnection

if TYPE_CHECKING:
    from kvhearth.router.config import Limits
    from kvhearth.router.engines import Engine

MOST_ANSWER_BYTES = 32 * 2**20


class _Stale(ConnectionError):
    """The engine had closed the connection before it saw the question."""


class _Question:
    """One question; a connection reports to it as to an exchange."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._status = 0
        self._pieces: list[bytes] = []
        self._nbytes = 0

    def on_head(self, status: int, reason: bytes, headers: bytes, length: bytes | None, *, has_body: bool) -> None:
        self._status = status

    def flush(self, pieces: list[bytes], *, complete: bool) -> None:
        self._nbytes += sum(map(len, pieces))
        self._pieces += pieces
        pieces.clear()
        if self._nbytes > MOST_ANSWER_BYTES:
            self._fail(ConnectionError(f"an answer of more than {MOST_ANSWER_BYTES} bytes"))
        elif complete and not self.answer.done():
            self.answer.set_result((self._status, b"".join(self._pieces)))

    def upstream_failed(self, reason: str, *, stale: bool = False) -> None:
        self._fail(_Stale(reason) if stale else ConnectionError(reason))

    def _fail(self, error: ConnectionError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


async def ask_engine(
    engine: Engine, limits: Limits, path: str, question: dict[str, Any], *, headers: bytes = b"", seconds: float
) -> tuple[int, Any]:
    """POST JSON; the status and the decoded answer (None where it is no JSON).

    Args:
        headers: further lines, each with its CRLF.
        seconds: deadline for all of it.

    Raises:
        OSError: unreachable, or no answer of HTTP.
        TimeoutError: past the deadline.
    """
    body = msgspec.json.encode(question)
    head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n" % (
        path.encode(),
        engine.host_header,
        headers,
        len(body),
    )
    async with asyncio.timeout(seconds):
        try:
            status, answer = await _exchange(engine, limits, head, body)
        except _Stale:  # the other idle ones are as old
            for old in list(engine.idle):
                old.close()
            status, answer = await _exchange(engine, limits, head, body)
    try:
        return status, msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError):
        return status, None


async def _exchange(engine: Engine, limits: Limits, head: bytes, body: bytes) -> tuple[int, bytes]:
    loop = asyncio.get_running_loop()
    connection = _idle(engine)
    if connection is None:
        connection = fresh = UpstreamConnection(engine, limits.max_head_bytes, limits.max_idle_per_engine)
        await loop.create_connection(lambda: fresh, engine.host, engine.port)
    asked = _Question(loop)
    connection.send(asked, head, body)
    try:
        found = await asked.answer
    except BaseException:
        connection.abort()
        raise
    connection.release(time.monotonic())
    return found


def _idle(engine: Engine) -> UpstreamConnection | None:
    while engine.idle:
        connection = engine.idle.pop()
        if connection.usable:
            return connection
    return None
