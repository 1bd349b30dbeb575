"""A client that goes away takes its work with it: whatever it asked, and however it goes."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from kvhearth.router.config import EventSource, KvSettings

PATHS = {
    "/v1/completions": {"prompt": [1, 2, 3]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
}
NOBODY = EventSource("tcp://127.0.0.1:1")


def leave(wire, how: str) -> None:
    """Close in order, or reset as a killed process behind a broken network does."""
    if how == "reset":
        wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


@pytest.mark.parametrize("how", ["closes", "reset"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("policy", ["prefix", "kv-aware"])
def test_the_engine_is_let_off_at_every_moment_of_a_request(lab, policy, path, how):
    waiting, streaming = lab.engine("waiting"), lab.engine("streaming")
    waiting.behave = lab.hang()
    streaming.behave = lab.events([b"data: 1\n\n"] * 100, gated=True)
    kv = KvSettings(events={"e0": NOBODY}, tokens_seconds=0.05)
    router = lab.router(waiting, streaming, policy=policy, kv=kv)

    def asking(model: str, **fields):
        wire = router.wire()
        wire.post(json.dumps({"model": model, **PATHS[path], **fields}).encode(), target=path)
        return wire

    def answering(engine) -> bool:
        return engine.serving == 1 and engine.requests[-1].target == path

    before_headers = asking("waiting", stream=True)
    lab.until(lambda: answering(waiting))
    leave(before_headers, how)
    lab.until(lambda: waiting.serving == 0)

    without_stream = asking("waiting")
    lab.until(lambda: answering(waiting))
    leave(without_stream, how)
    lab.until(lambda: waiting.serving == 0)

    mid_stream = asking("streaming", stream=True)
    lab.until(lambda: answering(streaming))
    streaming.let_go()
    mid_stream.head()
    mid_stream.chunk()
    leave(mid_stream, how)
    lab.until(lambda: streaming.serving == 0)

    lab.until(lambda: not router.inner.exchanges)
    assert router.metric("kvhearth_router_client_disconnects_total") == 3
    assert router.metric("kvhearth_router_in_flight_tokens") == 0
    assert router.metric("kvhearth_router_retries_total") == 0, "nobody else is asked in its place"


def test_one_client_of_many_leaves_and_the_others_get_their_answers(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n", b"data: [DONE]\n\n"], gated=True)
    router = lab.router(engine)
    wires = [router.wire() for _ in range(20)]
    for wire in wires:
        wire.prompt()
    lab.until(lambda: engine.serving == 20)
    for wire in wires[::2]:
        wire.close()
    lab.until(lambda: engine.serving == 10)
    engine.let_go(60)
    for wire in wires[1::2]:
        assert wire.response()[::2] == (200, b"data: 1\n\ndata: [DONE]\n\n")
    assert engine.disconnects == 10


def test_a_pipelined_request_of_a_client_that_left_never_reaches_an_engine(lab):
    engine = lab.engine()
    engine.behave = lab.hang()
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt("first")
    wire.prompt("second")
    lab.until(lambda: engine.serving == 1)
    wire.close()
    lab.until(lambda: engine.serving == 0 and not router.inner.clients)
    assert len(engine.requests) == 1
