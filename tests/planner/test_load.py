"""A workload played over HTTP: what is sent, what is recorded, and what counts as an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvhearth.engine.tokens import decode, encode, output_tokens, prompt_seed
from kvhearth.planner.load import LoadConfig, LoadRun, play
from kvhearth.planner.workload import Segment, Turn, User, Workload


class Server:
    """An engine that answers as the emulated model would, or as ``fault`` says."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.fault = ""
        self.url = ""

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        if self.fault == "refuse":
            return JSONResponse({"error": {"message": "busy"}}, status_code=503)
        return StreamingResponse(
            self._stream(body), media_type="text/event-stream", headers={"x-kvhearth-engine": "engine-7"}
        )

    async def _stream(self, body: dict[str, object]) -> AsyncIterator[bytes]:
        ids = encode(str(body["prompt"]))
        count = int(str(body["max_tokens"]))
        words = output_tokens(prompt_seed(ids), count)
        if self.fault == "wrong":
            words = words[:-1] + words[:1]
        if self.fault == "short":
            words = words[:-1]
        for word in words:
            yield b"data: " + json.dumps({"choices": [{"text": decode([word])}]}).encode() + b"\n\n"
            await asyncio.sleep(0.002)
        if self.fault == "error":
            yield b'data: {"error": {"message": "engine died"}}\n\n'
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(words)}
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        if self.fault != "cut":
            yield b"data: [DONE]\n\n"


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = Starlette(routes=[Route("/v1/completions", made.completions, methods=["POST"])])
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    task = asyncio.create_task(running.serve())
    while not running.started:
        await asyncio.sleep(0.01)
    made.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield made
    running.should_exit = True
    await task


CHAT = User("ann", "t", 0, (Turn((Segment(1, 30),), 5), Turn((Segment(2, 8),), 4, 1_000_000, continues=True)))


async def played(server: Server, *users: User, **settings: object) -> LoadRun:
    config = LoadConfig(server.url, "m", time_scale=10.0, check_text=True, **settings)  # type: ignore[arg-type]
    return await play(Workload("w", users), config)


async def test_a_conversation_is_sent_with_its_history_and_recorded(server: Server) -> None:
    run = await played(server, CHAT, api_key="k")
    first, second = run.served
    prompt = Segment(1, 30).text()
    answer = decode(output_tokens(prompt_seed(encode(prompt)), 5))
    assert [body["prompt"] for body in server.bodies] == [prompt, prompt + answer + Segment(2, 8).text()]
    assert all(body["ignore_eos"] and body["stream"] for body in server.bodies)
    assert server.keys == ["Bearer k"] * 2
    assert (first.error, second.error) == (None, None)
    assert (second.prompt_tokens, second.output_tokens, second.engine) == (43, 4, "engine-7")
    assert first.due_ns <= first.first_token_ns <= first.finished_ns
    assert second.due_ns == first.finished_ns + 1_000_000
    assert run.send_lag_seconds >= 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refuse", "HTTP 503"),
        ("wrong", "wrong text"),
        ("short", "4 tokens instead of 5"),
        ("cut", "stream ended early"),
        ("error", "error in the stream"),
    ],
)
async def test_faults_are_recorded_and_end_their_conversation(server: Server, fault: str, error: str) -> None:
    server.fault = fault
    alone = Turn((Segment(9, 6),), 5)
    (broken, own) = (await played(server, CHAT._replace(turns=(*CHAT.turns, alone)))).served
    assert error in str(broken.error)
    assert own.turn == 2  # the turn that would have continued is left out, the one after it is not


async def test_nobody_listening_is_an_error_not_a_crash() -> None:
    run = await play(Workload("w", (CHAT,)), LoadConfig("http://127.0.0.1:9", "m", 10.0))
    assert len(run.served) == 1
    assert "Cannot connect" in str(run.served[0].error)
