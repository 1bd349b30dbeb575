"""Reading a bounded body from, and writing plain responses to, a bare ASGI connection."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Send

from kvhearth.emulator.protocol import ApiError


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The request's body.

    Raises:
        ApiError: it is longer than ``limit_bytes``.
        ConnectionResetError: the client left before its end.
    """
    parts: list[bytes] = []
    total = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client left while sending")
        part = message.get("body", b"")
        total += len(part)
        if total > limit_bytes:
            raise ApiError(f"the body is longer than {limit_bytes} bytes", None, 413)
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_json(send: Send, status: int, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """One JSON response."""
    length = (b"content-length", str(len(body)).encode())
    all_headers = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, refusal: ApiError) -> None:
    """A refusal in OpenAI's form."""
    await send_json(send, refusal.status, msgspec.json.encode(refusal.body))
