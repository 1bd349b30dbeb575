"""The two generating endpoints as bare ASGI: read, submit, stream; a client that goes away takes its requests along."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from starlette.types import Message, Receive, Scope, Send

from kvhearth.emulator.answers import Call
from kvhearth.emulator.chunks import DONE, StreamEncoder, error_event, whole
from kvhearth.emulator.loop import EngineBusyError, EngineLoop
from kvhearth.emulator.protocol import ApiError, Generation, ModelLimits
from kvhearth.emulator.ranks import RANK_HEADER, Ranks
from kvhearth.emulator.replies import read_body, send_error, send_json
from kvhearth.errors import UserError

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerateEndpoint:
    """ASGI app of one generating endpoint.

    Args:
        ranks: the engine's.
        limits: what requests are checked against.
        parse: reads this endpoint's body.
        stream_interval: tokens a streamed piece after the first.
    """

    def __init__(
        self,
        ranks: Ranks,
        limits: ModelLimits,
        parse: Callable[[bytes, ModelLimits], Generation],
        stream_interval: int,
    ) -> None:
        self._ranks = ranks
        self._limits = limits
        self._parse = parse
        self._interval = stream_interval
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(receive, self._limits.max_body_bytes)
            async with self._turn:  # one at a time, so that a burst of long prompts does not hold up the engine's steps
                loop = self._ranks.pick(dict(scope["headers"]).get(RANK_HEADER))
                call = self._submit(loop, self._parse(raw, self._limits))
                await asyncio.sleep(0)
        except ApiError as refusal:
            await send_error(send, refusal)
            return
        except ConnectionResetError:
            return
        watch = asyncio.create_task(_until_gone(receive, call))
        try:
            if call.stream:
                await self._stream(call, send)
            else:
                await self._collect(call, send)
        except OSError:
            call.abandon()
        finally:
            watch.cancel()
            loop.abort(call)

    def _submit(self, loop: EngineLoop, generation: Generation) -> Call:
        if loop.dead is not None:
            raise ApiError(loop.dead, None, 500, "InternalServerError")
        try:
            loop.check_room(len(generation.prompts), sum(prompt.tokens for prompt in generation.prompts))
        except EngineBusyError as busy:
            raise ApiError(str(busy), None, 503, "ServiceUnavailableError") from None
        prefix = "chatcmpl" if generation.chat else "cmpl"
        interval = self._interval if generation.stream else 0
        call = Call(f"{prefix}-{uuid.uuid4().hex}", generation, loop.hashing, interval)
        try:
            loop.submit(call)
        except UserError as wrong:
            raise ApiError(str(wrong), "prompt") from None
        return call

    async def _stream(self, call: Call, send: Send) -> None:
        encoder = StreamEncoder(call, call.model, int(time.time()))
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        open_answers = list(call.answers)
        while open_answers:
            await call.news()
            if call.gone:
                return
            if call.error is not None:
                await send({"type": "http.response.body", "body": error_event(call.error)})
                return
            pieces = []
            for answer in open_answers:
                if answer.produced >= answer.wake_at:
                    if answer.taken == 0:
                        pieces.append(encoder.opening(answer))
                    pieces.append(encoder.piece(answer, answer.take(self._interval)))
            open_answers = [answer for answer in open_answers if not answer.complete]
            if not open_answers:
                break
            await send(_body(b"".join(pieces), more=True))
        if call.options.include_usage:
            pieces.append(encoder.usage(call))
        await send(_body(b"".join([*pieces, DONE]), more=False))

    async def _collect(self, call: Call, send: Send) -> None:
        while not call.complete:
            await call.news()
            if call.gone:
                return
            if call.error is not None:
                await send_error(send, ApiError(call.error, None, 500, "InternalServerError"))
                return
        await send_json(send, 200, whole(call, call.model, int(time.time())))


async def _until_gone(receive: Receive, call: Call) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.abandon()


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
