"""Faults at the HTTP surface: an ASGI layer that hangs, delays, refuses or cuts what passes, as `faults` says; and the
endpoint that says so to `faults`."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvhearth.emulator.faults import Faults
from kvhearth.emulator.protocol import ApiError
from kvhearth.emulator.replies import read_body, send_error

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_MAX_BODY_BYTES = 1 << 16


class FaultLayer:
    """In front of everything but ``/emulator/…``."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        faults, settings = self._faults, self._faults.settings
        path = scope.get("path", "")
        if scope["type"] != "http" or path.startswith("/emulator/"):
            await self._app(scope, receive, send)
            return
        generating = path in GENERATING_PATHS
        if settings.hang == "everything" or (settings.hang and generating):
            faults.note("hang")
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if not generating:
            await self._app(scope, receive, send)
            return
        if faults.happens("error_rate"):
            refusal = ApiError("a fault that was asked for", None, settings.error_status, "InternalServerError")
            await send_error(send, refusal)
            return
        if settings.slow_ms:
            faults.note("slow_ms")
            await asyncio.sleep(settings.slow_ms / 1000)
        if faults.happens("abort_rate"):
            send = _Cut(send, settings.abort_after_pieces)
        with contextlib.suppress(_CutError):
            await self._app(scope, receive, send)


class _CutError(OSError):
    """What a write to a cut connection ends with."""


class _Cut:
    """A ``send`` that breaks off after some pieces of a body: the server then closes the connection."""

    def __init__(self, send: Send, pieces: int) -> None:
        self._send = send
        self._left = pieces

    async def __call__(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        if self._left and message.get("more_body", False):
            self._left -= 1
            await self._send(message)
            return
        if self._left:  # the last piece, or the only one
            body = message["body"]
            await self._send({**message, "body": body[: len(body) // 2], "more_body": True})
        raise _CutError("cut off by a fault")


class FaultsEndpoint:
    """``/emulator/faults``, for this machine only: GET shows, POST sets some, DELETE clears all.

    Besides the fields of `FaultSettings` a POST takes ``"restart": true``, which happens at once.

    Args:
        restart: restarts the engine.
        on_change: called after each change.
    """

    def __init__(self, faults: Faults, restart: Callable[[], None], on_change: Callable[[], None]) -> None:
        self._faults = faults
        self._restart = restart
        self._on_change = on_change

    async def __call__(self, request: Request) -> Response:
        client = request.client
        if client is None or not _is_loopback(client.host):
            raise ApiError("faults can be set from this machine only", None, 403, "PermissionDeniedError")
        if request.method == "POST":
            await self._post(request)
        elif request.method == "DELETE":
            self._faults.clear()
            self._on_change()
        return JSONResponse(self._faults.state())

    async def _post(self, request: Request) -> None:
        raw = await read_body(request.receive, _MAX_BODY_BYTES)
        try:
            values = msgspec.json.decode(raw, type=dict[str, bool | float | str | int])
            restart = values.pop("restart", False)
            if not isinstance(restart, bool):
                raise ValueError(f"restart={restart!r}: give true or false")
            self._faults.change(values)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ApiError(f"no such faults: {error}") from None
        if restart:
            self._faults.note("restart")
            self._restart()
        self._on_change()


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
