"""Answers that the router gives itself, errors in OpenAI's form. Not for what engines answer."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

import msgspec

SERVER = b"kvhearth"
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class Reply(NamedTuple):
    """A complete response. ``extra`` is whole header lines, each ending in CRLF; ``code`` is set for errors."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    extra: bytes = b""
    code: str = ""


def error(
    status: int, message: str, code: str, *, param: str | None = None, retry_after_seconds: int = 0, extra: bytes = b""
) -> Reply:
    """An error as OpenAI's clients expect it: ``{"error": {"message", "type", "param", "code"}}``."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})
    if retry_after_seconds:
        extra += b"retry-after: %d\r\n" % retry_after_seconds
    return Reply(status, body, extra=extra, code=code)


def failed() -> Reply:
    """Where the router itself has a fault. There should be none; but no client is to wait for it for ever."""
    return error(500, "the router failed on this request; its log says how", "internal")


def head(reply: Reply, *, keep_alive: bool, http10: bool) -> bytes:
    """The reply's status line and headers."""
    connection = b"" if keep_alive else b"connection: close\r\n"
    if keep_alive and http10:
        connection = b"connection: keep-alive\r\n"
    return b"HTTP/1.1 %d %b\r\nserver: %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
        reply.status,
        REASONS[reply.status],
        SERVER,
        reply.content_type,
        len(reply.body),
        reply.extra,
        connection,
    )


class Refused(Exception):
    """The router answers a request itself, with an error. ``model`` is its label, "" when it is not a known one."""

    def __init__(self, reply: Reply, model: str = "") -> None:
        self.reply = reply
        self.model = model
        super().__init__(reply.code)
