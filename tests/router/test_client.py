"""What a client sees of HTTP itself: framing, order, limits."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest

from kvhearth.router.config import Limits, Timeouts

BODY = b'{"model": "m",  "prompt": "h\\u00e9llo", "x": 1e3}\n'


def test_the_body_reaches_the_engine_byte_for_byte_with_its_length(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.post(BODY)
    assert wire.response()[0] == 200
    assert engine.requests[0].body == BODY
    assert engine.requests[0].header("content-length") == [str(len(BODY))]


def test_a_chunked_body_reaches_the_engine_whole_and_with_a_length(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n")
    for piece in (BODY[:7], BODY[7:30], BODY[30:]):
        wire.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    wire.send(b"0\r\nX-Sum: 1\r\n\r\n")
    assert wire.response()[0] == 200
    assert engine.requests[0].body == BODY
    assert engine.requests[0].header("content-length") == [str(len(BODY))]
    assert not engine.requests[0].header("transfer-encoding")
    assert not engine.requests[0].header("x-sum")


def test_a_request_that_comes_byte_by_byte_is_one_request(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in b"POST /v1/completions?a=b HTTP/1.1\r\nHost: r\r\nX-Long: abc\r\nContent-Length: %d\r\n\r\n%b" % (
        len(BODY),
        BODY,
    ):
        wire.send(bytes([byte]))
    assert wire.response()[0] == 200
    assert engine.requests[0].body == BODY
    assert engine.requests[0].header("x-long") == ["abc"]
    assert engine.requests[0].target == "/v1/completions?a=b"


def test_pipelined_requests_are_answered_in_order_one_at_a_time(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    wire = lab.router(engine).wire()
    for number in range(30):
        wire.prompt(str(number))
        wire.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    lab.until(lambda: engine.serving == 1)
    for number in range(30):
        engine.let_go()
        assert wire.response()[2] == b'{"ok":true}'
        assert wire.response()[::2] == (200, b"")
        assert json.loads(engine.requests[number].body)["prompt"] == str(number)
    assert len(engine.requests) == 30


def test_a_connection_is_used_again_on_both_sides(lab):
    engine = lab.engine()
    router = lab.router(engine)
    wire = router.wire()
    for _ in range(20):
        wire.prompt()
        assert wire.response()[0] == 200
    [only] = router.inner.fleet.engines
    assert len(only.connections) == len(only.idle) == 1


def test_expect_100_continue_is_answered_before_the_body_is_sent(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    )
    assert wire.head() == (100, [])
    wire.send(BODY)
    assert wire.response()[0] == 200
    assert not engine.requests[0].header("expect")


def test_100_continue_waits_for_its_turn_behind_a_pipelined_request(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    wire = lab.router(engine).wire()
    wire.prompt()
    wire.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    )
    lab.until(lambda: engine.serving == 1)
    engine.let_go(2)
    assert wire.response()[0] == 200
    assert wire.head() == (100, [])
    wire.send(BODY)
    assert wire.response()[0] == 200


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_over_the_limit_is_refused_with_413_and_never_reaches_an_engine(lab, framing):
    engine = lab.engine()
    router = lab.router(engine, limits=Limits(max_body_bytes=100_000))
    wire = router.wire()
    if framing == "length":
        wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2000000\r\n\r\n")
        wire.send(b"x" * 2_000_000)
    else:
        wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(4):
            wire.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
    status, error = wire.error()
    assert (status, error["code"]) == (413, "body_too_large")
    assert "100000 bytes" in error["message"]
    assert wire.rest() == b""
    assert not engine.requests
    lab.until(lambda: router.inner.buffered_bytes == 0)


def test_all_bodies_together_are_bounded(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, limits=Limits(max_buffered_bytes=10_000))
    first = router.wire()
    first.prompt("x" * 8000)
    lab.until(lambda: engine.serving == 1)
    second = router.wire()
    second.prompt("y" * 8000)
    status, error = second.error()
    assert (status, error["code"], error["headers"]["retry-after"]) == (503, "overloaded", "1")
    engine.let_go(2)
    assert first.response()[0] == 200
    third = router.wire()
    third.prompt("z" * 8000)
    assert third.response()[0] == 200


def test_headers_without_end_are_refused(lab):
    wire = lab.router(lab.engine(), limits=Limits(max_head_bytes=10_000)).wire()
    wire.send(b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 20_000)
    assert wire.error()[0] == 431
    assert wire.rest() == b""


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["tls", "length-and-chunked", "two-lengths", "negative", "bad-chunk"],
)
def test_what_is_not_sound_http_is_refused_and_the_connection_closed(lab, request_bytes):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(request_bytes)
    status, error = wire.error()
    assert (status, error["code"]) == (400, "bad_http")
    assert wire.rest() == b""
    assert not engine.requests


def test_a_refusal_behind_a_pipelined_request_waits_for_its_turn(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    wire = lab.router(engine).wire()
    wire.prompt()
    wire.send(b"this is not HTTP\r\n\r\n")
    lab.until(lambda: engine.serving == 1)
    engine.let_go()
    assert wire.response()[0] == 200
    assert wire.error()[0] == 400


def test_a_refusal_does_not_replace_the_request_before_it(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    body = b'{"model":"m","prompt":"x"}'
    wire.send(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b\x16\x03\x01 rubbish\r\n"
        % (len(body), body)
    )
    assert wire.response()[0] == 200
    assert wire.error()[0] == 400
    assert len(engine.requests) == 1


def test_a_request_that_does_not_arrive_in_time_is_refused(lab):
    wire = lab.router(
        lab.engine(), timeouts=Timeouts(request_seconds=0.1, sweep_seconds=0.02, drain_seconds=0.1)
    ).wire()
    wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 50\r\n\r\nabc")
    assert wire.error()[0] == 408
    assert wire.rest() == b""


def test_sending_a_request_drop_by_drop_does_not_extend_its_time(lab):
    wire = lab.router(
        lab.engine(), timeouts=Timeouts(request_seconds=0.2, sweep_seconds=0.02, drain_seconds=0.1)
    ).wire()
    wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 100000\r\n\r\n")
    wire.sock.settimeout(0.05)
    for _ in range(200):
        with contextlib.suppress(TimeoutError):
            wire.head()
            return
        wire.send(b"x")
    pytest.fail("the router waits for ever")


def test_a_connection_without_requests_is_closed_in_the_end(lab):
    timeouts = Timeouts(client_idle_seconds=0.1, sweep_seconds=0.02, drain_seconds=0.1)
    wire = lab.router(lab.engine(), timeouts=timeouts).wire()
    assert wire.get("/health")[0] == 200
    assert wire.rest() == b""


def test_connections_are_bounded(lab):
    router = lab.router(lab.engine(), limits=Limits(max_connections=2))
    first, second = router.wire(), router.wire()
    assert first.get("/health")[0] == second.get("/health")[0] == 200
    third = router.wire()
    assert third.error()[0] == 503
    assert third.rest() == b""
    first.close()
    lab.until(lambda: len(router.inner.clients) == 1)
    assert router.wire().get("/health")[0] == 200


def test_an_http_1_0_client_gets_a_body_it_can_read(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n", b"data: 2\n\n"])
    wire = lab.router(engine).wire()
    wire.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY))
    status, lines = wire.head()
    fields = {name.lower(): value for name, value in lines}
    assert status == 200
    assert "transfer-encoding" not in fields
    assert fields["connection"] == "close"
    assert wire.rest() == b"data: 1\n\ndata: 2\n\n"


def test_connection_close_is_honoured(lab):
    wire = lab.router(lab.engine()).wire()
    wire.post(BODY, headers="Connection: close\r\n")
    status, lines, _ = wire.response()
    assert (status, dict(lines)["connection"]) == (200, "close")
    assert wire.rest() == b""


def test_an_offer_to_upgrade_is_declined_by_answering(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.post(BODY, headers="Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n")
    assert wire.response()[0] == 200
    assert engine.requests[0].body == BODY
    assert not engine.requests[0].header("upgrade")
    assert not engine.requests[0].header("http2-settings")
    wire.post(BODY)
    assert wire.response()[0] == 200


@pytest.mark.parametrize(
    ("target", "received"),
    [
        (b"http://router:8000/v1/completions?a=b", "/v1/completions?a=b"),
        (b"HTTPS://[::1]/v1/completions", "/v1/completions"),
    ],
)
def test_a_target_that_names_the_server_too_is_a_path_to_the_engine(lab, target, received):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(b"POST %b HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n%b" % (target, len(BODY), BODY))
    assert wire.response()[0] == 200
    assert engine.requests[0].target == received
    wire.send(b"GET http://router HTTP/1.1\r\nHost: r\r\n\r\n")
    assert wire.error()[0] == 404  # "/" is none of its pages
    assert wire.get("http://router/health")[0] == 200


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked\r\nTransfer-Encoding: chunked"])
def test_a_transfer_coding_that_would_be_lost_is_refused(lab, coding):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(f"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: {coding}\r\n\r\n".encode())
    wire.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert wire.error()[0] == 400
    assert wire.rest() == b""
    assert not engine.requests


@pytest.mark.parametrize(
    ("version", "connection", "kept"),
    [("1.0", "Upgrade", False), ("1.1", "Upgrade, close", False), ("1.1", "Upgrade", True)],
)
def test_who_offers_to_upgrade_gets_its_connection_closed_as_it_says(lab, version, connection, kept):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n"])
    wire = lab.router(engine).wire()
    wire.send(
        f"POST /v1/completions HTTP/{version}\r\nHost: r\r\nUpgrade: h2c\r\nConnection: {connection}\r\n"
        f"Content-Length: {len(BODY)}\r\n\r\n".encode()
        + BODY
    )
    status, lines = wire.head()
    assert status == 200
    assert ("chunked" in dict(lines).get("transfer-encoding", "")) == (version == "1.1")
    assert ("connection", "close") in lines or kept
    if kept:
        assert wire.chunk() == b"data: 1\n\n"
    else:
        assert b"data: 1\n\n" in wire.rest()


def test_a_tunnel_is_refused(lab):
    wire = lab.router(lab.engine()).wire()
    wire.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert wire.error()[0] == 405
    assert wire.rest() == b""


def test_head_gives_the_headers_alone(lab):
    wire = lab.router(lab.engine()).wire()
    wire.send(b"HEAD /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
    status, lines = wire.head()
    assert status == 200
    assert int(dict(lines)["content-length"]) > 0
    assert wire.get("/health")[0] == 200


def test_a_client_that_does_not_read_holds_back_its_own_requests(lab):
    router = lab.router(lab.engine())
    wire = router.wire()
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.sock.settimeout(0.3)
    request = b"GET /metrics HTTP/1.1\r\nHost: r\r\n\r\n" * 2000
    sent = 0
    assert wire.get("/health")[0] == 200
    [client] = router.inner.clients
    with contextlib.suppress(TimeoutError):
        while sent < 400 * len(request):
            sent += wire.sock.send(request)
    assert sent < 400 * len(request)
    lab.until(lambda: client.write_paused)
    assert len(client._queue) < 20_000  # what one read brings, not what the client sends
    assert router.wire().get("/health")[0] == 200


def test_trailers_and_chunk_sizes_without_end_are_refused(lab):
    router = lab.router(lab.engine(), limits=Limits(max_head_bytes=4096))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    for start, more in ((b"0\r\nX-Sum: ", b"a" * 1024), (b"1;ext=", b"a" * 1024)):
        wire = router.wire()
        wire.send(head + start)
        with contextlib.suppress(ConnectionError):
            for _ in range(2000):
                wire.send(more)
        assert wire.error()[0] == 431
    lab.until(lambda: router.inner.buffered_bytes == 0)


def test_a_long_body_in_many_small_chunks_is_not_taken_for_headers(lab):
    engine = lab.engine()
    wire = lab.router(engine, limits=Limits(max_head_bytes=512)).wire()
    wire.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n")
    for byte in BODY * 10:
        wire.send(b"1\r\n")
        wire.send(b"%c\r\n" % byte)
    wire.send(b"0\r\n\r\n")
    assert wire.error()[0] == 400  # ten objects in a row are not JSON; the framing was taken


def test_the_head_behind_a_long_pipelined_body_is_not_taken_for_too_long(lab):
    engine = lab.engine()
    wire = lab.router(engine, limits=Limits(max_head_bytes=1024)).wire()
    body = json.dumps({"model": "m", "prompt": "x" * 20_000}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    wire.send(post + post[:30])
    assert wire.response()[0] == 200
    wire.send(post[30:])
    assert wire.response()[0] == 200


def test_any_number_of_pipelined_offers_to_upgrade_is_declined_by_answering(lab):
    wire = lab.router(lab.engine()).wire()
    wire.send(b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" * 2000)
    for _ in range(2000):
        assert wire.response()[0] == 200
