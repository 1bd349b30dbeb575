"""Headers on their way through one router, and through one behind another."""

from __future__ import annotations

import json

import pytest

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b"\x00\xff\r\n--b--\r\n"
)


def form(wire, target: str, model: bytes) -> bytes:
    """Post a form with a file; its body."""
    body = FORM % model
    wire.send(
        b"POST %b HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer sk-1\r\nX-Trace: 7\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: %d\r\n\r\n%b"
        % (target.encode(), len(body), body)
    )
    return body


def test_a_form_keeps_query_authorization_type_and_bytes(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    body = form(wire, "/v1/audio/transcriptions?language=de&x=%2F", b"m")
    assert wire.response()[0] == 200
    received = engine.requests[0]
    assert received.target == "/v1/audio/transcriptions?language=de&x=%2F"
    assert received.header("authorization") == ["Bearer sk-1"]
    assert received.header("content-type") == ["multipart/form-data; boundary=b"]
    assert received.header("x-trace") == ["7"]
    assert received.body == body


@pytest.mark.parametrize("alias", ["a", "a much longer name than the model has"])
def test_a_body_whose_model_is_written_anew_has_its_own_length(lab, alias):
    engine = lab.engine("model")
    wire = lab.router(engine, aliases={alias: "model"}).wire()
    wire.post(json.dumps({"model": alias, "prompt": "grüß Gott"}).encode())
    assert wire.response()[0] == 200
    form(wire, "/v1/audio/transcriptions", alias.encode())
    assert wire.response()[0] == 200
    for received in engine.requests:
        assert received.header("content-length") == [str(len(received.body))]
    assert json.loads(engine.requests[0].body) == {"model": "model", "prompt": "grüß Gott"}
    assert engine.requests[1].body == FORM % b"model"


@pytest.mark.parametrize("streamed", [False, True])
def test_behind_another_router_each_header_is_there_once_and_hops_are_not_passed_on(lab, streamed):
    engine = lab.engine()
    hop = b"Server: uvicorn\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
    if streamed:
        pieces = b"4\r\nabcd\r\n2\r\nef\r\n0\r\n\r\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
        engine.behave = lab.raw(head + hop + b"\r\n", pieces)
    else:
        engine.behave = lab.reply(body=b"abcdef", headers=b"Content-Type: text/event-stream; charset=utf-8\r\n" + hop)
    inner = lab.router(engine)
    outer = lab.router(inner)
    wire = outer.wire()
    wire.post(
        b'{"model":"m","prompt":"x"}',
        target="/v1/completions?a=1&a=2",
        headers="Connection: X-Once\r\nX-Once: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nAuthorization: Bearer k\r\n",
    )
    status, lines, body = wire.response()
    assert (status, body) == (200, b"abcdef")
    names = [name for name, _ in lines]
    assert len(names) == len(set(names)), "no header twice"
    told = dict(lines)
    assert (told["server"], told["content-type"]) == ("kvhearth", "text/event-stream; charset=utf-8")
    assert not {"x-hop", "keep-alive"} & set(names)
    assert ("content-length" in told) != ("transfer-encoding" in told)
    received = engine.requests[0]
    assert received.target == "/v1/completions?a=1&a=2"
    assert not {"x-once", "te", "upgrade", "connection"} & {name.lower() for name, _ in received.lines}
    assert received.header("authorization") == ["Bearer k"]
    assert received.header("host") == [f"127.0.0.1:{engine.port}"]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; version=1", "audio/mpeg", ""])
@pytest.mark.parametrize("status", [200, 400, 429, 503])
def test_an_engines_content_type_and_retry_after_are_kept_with_its_status(lab, status, content_type):
    engine = lab.engine()
    line = f"Content-Type: {content_type}\r\n".encode() if content_type else b""
    engine.behave = lab.reply(status=status, body=b"body", headers=line + b"Retry-After: 9\r\n")
    wire = lab.router(engine).wire()
    wire.prompt()
    got, lines, body = wire.response()
    told = dict(lines)
    assert (got, body, told.get("content-type", "")) == (status, b"body", content_type)
    assert (told["retry-after"], told["content-length"]) == ("9", "4")
