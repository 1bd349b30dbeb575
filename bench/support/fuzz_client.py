"""A client of the fuzz: sends a case, reads what comes back as strictly as RFC 9112 allows, and judges it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from support.fuzzing import NONCE, Sent

DEADLINE_SECONDS = 20.0
QUIET_SECONDS = 0.1
"""Silence after which no more is waited for, where it is not known whether an answer is due."""

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [\t\x20-\x7e\x80-\xff]*")
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([\t\x20-\x7e\x80-\xff]*)")
_SIZE = re.compile(rb"[0-9a-fA-F]{1,16}")


class Case(NamedTuple):
    """What one connection sends.

    Attributes:
        number: of the case in the run.
        sent: whole requests, each of which is due an answer, in this order.
        expected: of each, status and body of its answer where an engine must have given that.
        rest: what follows them, of which nothing is known.
        pieces: all of it as it is sent.
        bad: an engine that does not answer right may be asked.
        leaves_after: bytes after which the client is gone; None = it stays.
        patience_seconds: how long it waits for the next bytes of an answer that is due.
        pause_seconds: between pieces.
    """

    number: int
    sent: Sequence[Sent]
    expected: Sequence[tuple[int, bytes] | None]
    rest: bytes
    pieces: Sequence[bytes]
    bad: bool
    leaves_after: int | None = None
    patience_seconds: float = DEADLINE_SECONDS
    pause_seconds: float = 0.0

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


class Received(NamedTuple):
    """What came back, whether the router closed the connection, and whether the client had left before."""

    data: bytes = b""
    closed: bool = False
    left: bool = False


class Response(NamedTuple):
    """One response. ``whole``: it came to its end, as far as that can be seen."""

    status: int
    lines: dict[bytes, list[bytes]]
    body: bytes
    whole: bool

    @property
    def from_engine(self) -> bool:
        return b"x-kvhearth-engine" in self.lines


class BadResponse(Exception):
    """What the router wrote is no HTTP/1.1."""


async def play(case: Case, port: int) -> Received:
    """Send a case. Raises OSError: the router does not listen."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    data, responses = bytearray(), Reader(case)
    try:
        left = len(case.data) if case.leaves_after is None else case.leaves_after
        for piece in case.pieces:
            writer.write(piece[:left])
            left -= len(piece)
            if left <= 0:
                break
            await asyncio.sleep(case.pause_seconds)
        if case.leaves_after is not None:
            await asyncio.sleep(0.01 * (case.number % 3))
            return Received(left=True)
        while True:
            due = len(responses.found) < len(case.sent)
            if not due and not case.rest:
                return Received(bytes(data))
            try:
                async with asyncio.timeout(case.patience_seconds if due else QUIET_SECONDS):
                    more = await reader.read(1 << 16)
            except TimeoutError:
                return Received(bytes(data), left=not due or case.patience_seconds < DEADLINE_SECONDS)
            data += more
            responses.take(more)
            if not more:
                return Received(bytes(data), closed=True)
    except (ConnectionError, RuntimeError):  # uvloop: it is closed
        return Received(bytes(data), closed=True)
    except BadResponse:
        return Received(bytes(data))  # `judge` will find it too
    finally:
        writer.transport.abort()


def judge(case: Case, received: Received, owners: dict[bytes, int], status: Counter[str]) -> str:
    """What is wrong with what came back; "" = nothing.

    Args:
        owners: of every nonce, the case that sent it.
        status: counts the responses.
    """
    foreign = [nonce for nonce in NONCE.findall(received.data) if owners.get(nonce, case.number) != case.number]
    if foreign:
        return f"it got what was meant for case {owners[foreign[0]]}"
    reader = Reader(case)
    try:
        reader.take(received.data)
    except BadResponse as bad:
        return f"what came back is no HTTP: {bad}"
    if received.closed:
        reader.end()
    for response in reader.found:
        status[f"{'engine' if response.from_engine else 'router'} {response.status}"] += 1
        wrong = "" if response.from_engine else _own_fault(response, case)
        if wrong:
            return wrong
    return _missing(case, reader.found, received)


def _own_fault(response: Response, case: Case) -> str:
    """What the router answers itself: never 500, and any other 5xx only where an engine gave cause for it."""
    if response.status < 500:
        return ""
    code = json.loads(response.body)["error"]["code"] if response.whole else "cut"
    if response.status in (502, 503, 504) and case.bad and code not in ("overloaded", "too_many_connections"):
        return ""
    return f"the router itself answered {response.status} {code}: {response.body[:200]!r}"


def _missing(case: Case, found: Sequence[Response], received: Received) -> str:
    may_lack = received.left or (case.bad and received.closed)
    for at, (expected, sent) in enumerate(zip(case.expected, case.sent, strict=True)):
        if at >= len(found):
            return "" if may_lack else f"answer {at + 1} of {len(case.sent)} did not come"
        answer = found[at]
        if not answer.whole and not may_lack:
            return f"answer {at + 1} is not whole: {answer}"
        wrong = answer.whole and (answer.from_engine or not case.bad or answer.status in (502, 504))
        if expected is not None and wrong and (answer.status, answer.body) != expected:
            return f"answer {at + 1} is {answer.status} {answer.body[:200]!r}, not {expected[0]} {expected[1][:200]!r}"
        others = {one.nonce.encode() for one in case.sent} - {sent.nonce.encode()}
        if not others.isdisjoint(NONCE.findall(answer.body)):
            return f"answer {at + 1} is that to another request of the connection"
    if not case.rest and len(found) > len(case.sent):
        return f"{len(found)} answers to {len(case.sent)} requests"
    return ""


class Reader:
    """Takes what comes back as it comes, and makes responses of it; interim ones are left out.

    Raises BadResponse where it is not as it must be.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._data = bytearray()
        self._at = 0
        self._head: tuple[int, dict[bytes, list[bytes]]] | None = None
        self._pieces: list[bytes] = []
        self.found: list[Response] = []

    def take(self, data: bytes) -> None:
        """More bytes."""
        self._data += data
        while self._at < len(self._data) or self._head is not None:
            if self._head is None and not self._read_head():
                return
            if self._head is not None and not self._read_body():
                return

    def end(self) -> None:
        """The connection is closed: what is still open ends here, whole where its end is the connection's."""
        if self._head is not None:
            status, lines = self._head
            ends_here = not lines.keys() & {b"content-length", b"transfer-encoding"}
            self._pieces.append(bytes(self._data[self._at :]))
            self.found.append(Response(status, lines, b"".join(self._pieces), ends_here))
            self._head = None

    def _read_head(self) -> bool:
        end = self._data.find(b"\r\n\r\n", self._at)
        if end < 0:
            if len(self._data) - self._at > 1 << 20:
                raise BadResponse("a head without end")
            return False
        first, *rest = bytes(self._data[self._at : end]).split(b"\r\n")
        status = _STATUS.fullmatch(first)
        if status is None:
            raise BadResponse(f"status line {first[:200]!r}")
        lines: dict[bytes, list[bytes]] = {}
        for line in rest:
            parts = _LINE.fullmatch(line)
            if parts is None:
                raise BadResponse(f"header line {line[:200]!r}")
            lines.setdefault(parts[1].lower(), []).append(parts[2])
        _check(int(status[1]), lines)
        self._at = end + 4
        if int(status[1]) != 100:
            self._head, self._pieces = (int(status[1]), lines), []
        return True

    def _read_body(self) -> bool:
        """Whether the response is whole now."""
        assert self._head is not None
        (status, lines), number, sent = self._head, len(self.found), self._case.sent
        if number >= len(sent) and b"HEAD" in self._case.rest:
            return False  # who knows
        if not (status in (204, 304) or (number < len(sent) and sent[number].is_head)):
            if b"transfer-encoding" in lines:
                if not self._read_chunks():
                    return False
            elif b"content-length" not in lines or not self._read_exactly(int(lines[b"content-length"][0])):
                return False
        self.found.append(Response(status, lines, b"".join(self._pieces), True))
        self._head = None
        return True

    def _read_exactly(self, length: int) -> bool:
        if len(self._data) - self._at < length:
            return False
        self._pieces.append(bytes(self._data[self._at : self._at + length]))
        self._at += length
        return True

    def _read_chunks(self) -> bool:
        data = self._data
        while True:
            end = data.find(b"\r\n", self._at)
            if end < 0 and len(data) - self._at <= 16:
                return False
            digits = bytes(data[self._at : end if end >= 0 else self._at + 40])
            if end < 0 or _SIZE.fullmatch(digits) is None:
                raise BadResponse(f"chunk size {digits[:40]!r}")
            size, start = int(digits, 16), end + 2
            if len(data) < start + size + 2:
                return False
            if data[start + size : start + size + 2] != b"\r\n":
                raise BadResponse(f"behind a chunk {bytes(data[start + size : start + size + 10])!r}")
            self._pieces.append(bytes(data[start : start + size]))
            self._at = start + size + 2
            if not size:
                return True


def _check(status: int, lines: dict[bytes, list[bytes]]) -> None:
    if status == 100:
        if lines:
            raise BadResponse("100 with headers")
        return
    if status < 200:
        raise BadResponse(f"status {status}")
    if lines.get(b"server") != [b"kvhearth"]:
        raise BadResponse(f"server is {lines.get(b'server')}")
    for name in (b"content-length", b"transfer-encoding", b"x-kvhearth-engine", b"connection"):
        if len(lines.get(name, [])) > 1:
            raise BadResponse(f"{name!r} twice")
    if b"content-length" in lines and b"transfer-encoding" in lines:
        raise BadResponse("two kinds of framing")
    for name in (b"keep-alive", b"upgrade", b"te", b"trailer", b"proxy-connection"):
        if name in lines:
            raise BadResponse(f"{name!r} of another hop")
