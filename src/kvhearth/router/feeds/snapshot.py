"""What an engine holds right now, asked of the connector's ``GET /snapshot``: one batch of KV events. No state."""

from __future__ import annotations

import asyncio

from kvhearth.store.protocol.address import Address

_MAX_HEAD_BYTES = 16 * 1024
_MAX_BODY_BYTES = 512 * 2**20
_BUSY_SECONDS = 1.0


class SnapshotError(Exception):
    """There is no snapshot to be had; the message says why."""


async def ask_snapshot(address: Address, token: str, deadline_seconds: float) -> bytes:
    """The payload of the snapshot, one batch in msgpack.

    Args:
        address: TCP host and port of the connector's snapshot server.
        token: sent as bearer token; "" for none.
        deadline_seconds: for all of it, attempts on a busy server included.

    Raises:
        SnapshotError: unreachable, too late, refused, or no answer of HTTP.
    """
    try:
        async with asyncio.timeout(deadline_seconds):
            while True:
                status, body = await _get(address, token)
                if status != 503:
                    break
                await asyncio.sleep(_BUSY_SECONDS)
    except TimeoutError:
        raise SnapshotError(f"no answer within {deadline_seconds:g} s") from None
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
        raise SnapshotError(str(error) or type(error).__name__) from None
    if status != 200:
        raise SnapshotError(f"status {status}")
    return body


async def _get(address: Address, token: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_HEAD_BYTES)
    try:
        bearer = f"Authorization: Bearer {token}\r\n" if token else ""
        writer.write(f"GET /snapshot HTTP/1.1\r\nHost: {address}\r\n{bearer}Connection: close\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = head[0].split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ValueError("not an answer of HTTP")
        lengths = [line.partition(":")[2].strip() for line in head[1:] if line.lower().startswith("content-length:")]
        if len(lengths) != 1 or not lengths[0].isdigit() or int(lengths[0]) > _MAX_BODY_BYTES:
            raise ValueError(f"an answer without a length of at most {_MAX_BODY_BYTES} bytes")
        return int(words[1]), await reader.readexactly(int(lengths[0]))
    finally:
        writer.close()
