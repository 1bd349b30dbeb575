"""What becomes of a request when engines or clients fail, and how responses pass through."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from kvhearth.router.config import HealthChecks, Limits, Queueing, Timeouts

FAST = Timeouts(connect_seconds=0.3, first_byte_seconds=0.3, idle_seconds=0.3, sweep_seconds=0.02, drain_seconds=0.2)
NO_CHECKS = HealthChecks(interval_seconds=1000)


def all_quiet(router) -> bool:
    """Every per-request table is empty and every gauge is 0."""
    engines = router.inner.fleet.engines
    return not (
        router.inner.exchanges
        or router.inner.buffered_bytes
        or any(engine.requests_in_flight or engine.tokens_in_flight for engine in engines)
    )


# How responses pass through


def test_a_stream_arrives_piece_by_piece_as_the_engine_sends_it(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"], gated=True)
    wire = lab.router(engine).wire()
    wire.prompt()
    status, lines = wire.head()  # before the first piece exists
    assert (status, dict(lines)["transfer-encoding"]) == (200, "chunked")
    for piece in (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"):
        engine.let_go()  # the next piece is sent only now, after the one before was seen
        assert wire.chunk() == piece
    assert wire.chunk() == b""


@pytest.mark.parametrize("body", [b"", b"x", b"y" * 3_000_000], ids=["empty", "short", "3MB"])
@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
def test_a_body_passes_unchanged_however_it_is_framed(lab, framing, body):
    engine = lab.engine()
    if framing == "length":
        engine.behave = lab.reply(body=body)
    elif framing == "chunked":
        engine.behave = lab.events([body[i : i + 70_000] for i in range(0, len(body), 70_000)])
    else:
        engine.behave = lab.raw(b"HTTP/1.1 200 OK\r\n\r\n", body, then_close=True)
    router = lab.router(engine)
    wire = router.wire()
    for _ in range(2):
        wire.prompt()
        status, lines, got = wire.response()
        assert (status, got) == (200, body)
        lengths = [value for name, value in lines if name == "content-length"]
        assert lengths == ([str(len(body))] if framing == "length" else [])
    lab.until(lambda: all_quiet(router))


def test_case_12_response_headers_are_the_engines_without_those_of_the_hop_and_with_one_server(lab):
    engine = lab.engine()
    engine.behave = lab.reply(
        headers=b"Server: uvicorn\r\nserver: again\r\nContent-Type: text/plain; charset=utf-8\r\nX-Request-Id: 7\r\n"
        b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nKeep-Alive: timeout=5\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
    )
    wire = lab.router(engine).wire()
    wire.prompt()
    _, lines = wire.head()
    assert lines == [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("X-Request-Id", "7"),
        ("Set-Cookie", "a=1"),
        ("Set-Cookie", "b=2"),
        ("server", "kvhearth"),
        ("x-kvhearth-engine", "e0"),
        ("x-kvhearth-decision", "1"),
        ("content-length", "11"),
    ]


def test_case_12_request_headers_are_the_clients_without_those_of_the_hop(lab):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.post(
        b'{"model":"m","prompt":"x"}',
        target="/v1/completions?a=1&b=%20c",
        headers="Authorization: Bearer sk-1\r\nX-Two: 1\r\nX-Two: 2\r\nConnection: X-Hop\r\nX-Hop: secret\r\n"
        "TE: trailers\r\nKeep-Alive: timeout=9\r\nProxy-Authorization: Basic eA==\r\n",
    )
    assert wire.response()[0] == 200
    received = engine.requests[0]
    assert received.target == "/v1/completions?a=1&b=%20c"
    assert received.lines == [
        ("host", f"127.0.0.1:{engine.port}"),
        ("Content-Type", "application/json"),
        ("Authorization", "Bearer sk-1"),
        ("X-Two", "1"),
        ("X-Two", "2"),
        ("content-length", "26"),
    ]


@pytest.mark.parametrize("status", [204, 304])
def test_a_response_without_body_ends_with_its_head(lab, status):
    engine = lab.engine()
    engine.behave = lab.raw(b"HTTP/1.1 %d Nothing\r\nX-A: 1\r\n\r\n" % status)
    wire = lab.router(engine).wire()
    for _ in range(2):
        wire.prompt()
        got, lines, body = wire.response()
        assert (got, body) == (status, b"")
        assert "transfer-encoding" not in dict(lines)


def test_an_engines_own_errors_pass_unchanged(lab):
    engine = lab.engine()
    engine.behave = lab.reply(422, b'{"error":"mine"}')
    wire = lab.router(engine).wire()
    wire.prompt()
    status, _, body = wire.response()
    assert (status, body) == (422, b'{"error":"mine"}')


def test_an_interim_response_is_not_taken_for_the_answer(lab):
    engine = lab.engine()
    engine.behave = lab.raw(
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    )
    wire = lab.router(engine).wire()
    for _ in range(2):
        wire.prompt()
        status, lines, body = wire.response()
        assert (status, body) == (200, b"hi")
        assert "link" not in dict(lines)


@pytest.mark.parametrize(
    "surplus",
    [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", b"HTTP/1.1 200 OK\r\nX-Evil: ", b"\r\nrubbish"],
    ids=["whole", "half", "rubbish"],
)
def test_bytes_after_a_response_do_not_reach_the_next_client(lab, surplus):
    engine = lab.engine()
    engine.behave = lab.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi" + surplus)
    router = lab.router(engine)
    wire = router.wire()
    for _ in range(3):
        wire.prompt()
        status, lines, body = wire.response()
        assert (status, body) == (200, b"hi")
        assert "x-evil" not in dict(lines)
        [only] = router.inner.fleet.engines
        lab.until(lambda only=only: not only.connections, "that connection being given up")
    assert wire.buffer == b""


def test_ten_megabytes_up_and_more_down_with_a_client_that_reads_late(lab):
    big = b"0123456789abcdef" * (10 * 65536)
    engine = lab.engine()
    engine.behave = lab.events([big[:1_000_000]] * 20)  # more than all socket buffers on the way
    router = lab.router(engine)
    wire = router.wire()
    body = json.dumps({"model": "m", "prompt": big.decode()}).encode()
    wire.post(body)
    lab.until(lambda: engine.serving == 1)
    assert router.wire().get("/health")[0] == 200  # others are served meanwhile
    [exchange] = router.inner.exchanges
    lab.until(lambda: exchange._client.write_paused, "back pressure")
    assert exchange._client._transport.get_write_buffer_size() < 2 * 1024 * 1024
    assert engine.serving == 1  # the engine is held back, too: it is not done
    assert wire.response()[2] == big[:1_000_000] * 20
    assert engine.requests[0].body == body
    lab.until(lambda: all_quiet(router))


# Clients that leave


@pytest.mark.parametrize("when", ["before headers", "mid-stream", "non-stream"])
def test_case_5_when_the_client_leaves_the_engine_sees_it_at_once(lab, when):
    engine = lab.engine()
    if when == "mid-stream":
        engine.behave = lab.events([b"data: 1\n\n"] * 100, gated=True)
    elif when == "before headers":
        engine.behave = lab.hang()
    else:
        engine.behave = lab.gated(lab.reply())
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: engine.serving == 1)
    if when == "mid-stream":
        engine.let_go()
        wire.head()
        assert wire.chunk() == b"data: 1\n\n"
    wire.close()
    lab.until(lambda: engine.disconnects == 1, "the engine seeing its client leave")
    lab.until(lambda: all_quiet(router))
    assert router.metric("kvhearth_router_client_disconnects_total") == 1
    assert router.metric("kvhearth_router_upstream_failures_total") == 0


def test_case_5_when_the_client_leaves_while_an_engine_is_being_connected_nothing_is_left(lab):
    engine = lab.engine()
    with full_listener() as port:
        router = lab.router(engine)
        router.inner.fleet.engines[0].port = port
        wire = router.wire()
        wire.prompt()
        lab.until(lambda: router.inner.exchanges)
        wire.close()
        lab.until(lambda: all_quiet(router))


# Engines that fail


def test_an_engine_that_refuses_is_replaced_by_another_before_the_client_notices(lab):
    dead, alive = lab.engine(), lab.engine()
    router = lab.router(dead, alive, health=NO_CHECKS)
    dead.die()
    wire = router.wire()
    for _ in range(6):
        wire.prompt()
        status, lines, _ = wire.response()
        assert (status, dict(lines)["x-kvhearth-engine"]) == (200, "e1")
    assert len(alive.requests) == 6
    assert router.metric("kvhearth_router_retries_total", kind="other_engine") == 1  # then it is known to be down
    assert router.metric("kvhearth_router_upstream_failures_total", engine="e0", reason="connect_failed") == 1
    assert router.metric("kvhearth_router_engines", state="healthy") == 1


def test_an_engine_that_hangs_up_before_its_response_is_replaced_once(lab):
    first, second = lab.engine(), lab.engine()
    first.behave = second.behave = lab.hang_up()
    router = lab.router(first, second)
    wire = router.wire()
    wire.prompt()
    status, error = wire.error()
    assert (status, error["code"]) == (502, "closed")
    assert len(first.requests) == len(second.requests) == 1  # one retry, not more
    lab.until(lambda: all_quiet(router))
    wire.prompt()
    assert wire.error()[0] == 502


def test_half_a_head_is_no_response_and_may_be_retried(lab):
    first, second = lab.engine(), lab.engine()
    first.behave = lab.hang_up(b"HTTP/1.1 200 OK\r\nContent-Le")
    wire = lab.router(first, second).wire()
    wire.prompt()
    status, lines, body = wire.response()
    assert (status, body, dict(lines)["x-kvhearth-engine"]) == (200, b'{"ok":true}', "e1")


def test_when_the_only_engine_refuses_the_answer_is_503_with_retry_after(lab):
    engine = lab.engine()
    router = lab.router(engine, health=NO_CHECKS)
    engine.die()
    wire = router.wire()
    for code in ("connect_failed", "no_healthy_engine"):
        wire.prompt()
        status, error = wire.error()
        assert (status, error["code"], error["headers"]["retry-after"]) == (503, code, "1")
    assert wire.get("/health")[0] == 503


def test_a_stale_connection_is_replaced_by_a_fresh_one_to_the_same_engine(lab):
    engine = lab.engine()
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt()
    assert wire.response()[0] == 200
    engine.behave = once(lab.hang_up(), then=lab.reply(body=b"fresh"))
    wire.prompt()
    assert wire.response()[2] == b"fresh"
    assert router.metric("kvhearth_router_retries_total", kind="stale_connection") == 1
    assert router.metric("kvhearth_router_upstream_failures_total") == 0


def test_an_engine_that_dies_mid_stream_cuts_the_client_off_visibly(lab):
    engine, other = lab.engine(), lab.engine()
    engine.behave = lab.events([b"data: 1\n\n"], die=True)
    router = lab.router(engine, other)
    wire = router.wire()
    wire.prompt()
    wire.head()
    assert wire.chunk() == b"data: 1\n\n"
    assert wire.rest() == b""  # no last chunk: not a clean end
    assert not other.requests  # never answered twice
    assert router.metric("kvhearth_router_upstream_failures_total", engine="e0", reason="closed") == 1
    assert router.metric("kvhearth_router_requests_total", status_class="cut") == 1
    assert all_quiet(router)


def test_a_response_shorter_than_its_length_cuts_the_client_off(lab):
    engine = lab.engine()
    engine.behave = lab.hang_up(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
    wire = lab.router(engine).wire()
    wire.prompt()
    assert dict(wire.head()[1])["content-length"] == "10"
    assert wire.rest() == b"half"


def test_an_http_1_0_client_is_reset_for_it_has_no_other_way_to_know(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n"], die=True)
    wire = lab.router(engine).wire()
    body = b'{"model":"m","prompt":"x"}'
    wire.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    with pytest.raises(ConnectionResetError):
        wire.rest()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
    ],
    ids=["ssh", "gzip-coding", "two-lengths", "upgrade", "endless-head", "status-999", "status-099"],
)
def test_what_is_not_sound_http_from_an_engine_is_a_502(lab, answer):
    engine = lab.engine()
    engine.behave = lab.raw(answer)
    router = lab.router(engine)
    wire = router.wire()
    wire.prompt()
    status, error = wire.error()
    assert (status, error["code"]) == (502, "protocol")
    lab.until(lambda: all_quiet(router))
    assert router.metric("kvhearth_router_requests_total", status_class="5xx") == 1


@pytest.mark.parametrize("start", [b"0\r\nX-Sum: ", b"1;ext="], ids=["trailers", "chunk-extension"])
def test_trailers_and_chunk_sizes_without_end_cut_the_client_off(lab, start):
    engine = lab.engine()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n"
    engine.behave = lab.raw(head, start, *[b"a" * 1024] * 2000)
    router = lab.router(engine, limits=Limits(max_head_bytes=4096))
    wire = router.wire()
    wire.prompt()
    assert wire.head()[0] == 200
    assert wire.rest() == b"2\r\nok\r\n"
    lab.until(lambda: all_quiet(router) and engine.disconnects)


# Engines that do not answer


def test_case_4_an_engine_that_accepts_and_never_answers_is_cut_off_and_slows_nobody(lab):
    stuck, well = lab.engine("stuck"), lab.engine("well")
    stuck.behave = lab.hang()
    router = lab.router(stuck, well, timeouts=FAST)
    waiting = [router.wire() for _ in range(20)]
    for wire in waiting:
        wire.prompt(model="stuck")
    lab.until(lambda: stuck.serving == 20)
    other = router.wire()
    other.prompt(model="well")
    assert other.response()[0] == 200
    assert other.get("/health")[0] == 200
    for wire in waiting:
        status, error = wire.error()
        assert (status, error["code"]) == (504, "first_byte_timeout")
    lab.until(lambda: stuck.disconnects == 20)
    assert len(stuck.requests) == 20  # a slow engine's work is not given to another one
    assert all_quiet(router)


def test_who_waits_for_an_engine_that_health_checks_give_up_is_answered_by_another(lab):
    stuck, well = lab.engine(), lab.engine()
    stuck.behave = lab.hang()
    checks = HealthChecks(interval_seconds=0.02, deadline_seconds=0.1, failures_to_down=2)
    router = lab.router(stuck, well, health=checks)
    waiting = [router.wire() for _ in range(4)]
    for wire in waiting:
        wire.prompt()
    lab.until(lambda: stuck.serving == 2)
    stuck.health_delay_seconds = 5
    for wire in waiting:
        assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_upstream_failures_total", engine="e0", reason="engine_down") == 2
    lab.until(lambda: stuck.disconnects == 2)
    assert all_quiet(router)


def test_without_another_engine_it_says_so_at_once(lab):
    stuck = lab.engine()
    stuck.behave = lab.hang()
    router = lab.router(stuck, health=HealthChecks(interval_seconds=0.02, deadline_seconds=0.1, failures_to_down=2))
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: stuck.serving == 1)
    stuck.health_delay_seconds = 5
    status, error = wire.error()
    assert (status, error["code"]) == (503, "engine_down")


def test_a_stream_that_falls_silent_is_cut_off(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n"] * 2, gated=True)
    router = lab.router(engine, timeouts=FAST)
    wire = router.wire()
    wire.prompt()
    engine.let_go()
    wire.head()
    assert wire.chunk() == b"data: 1\n\n"
    assert wire.rest() == b""
    lab.until(lambda: engine.disconnects == 1)
    assert router.metric("kvhearth_router_upstream_failures_total", reason="idle_timeout") == 1


def test_a_client_that_stops_reading_is_cut_off(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"x" * 1_000_000] * 20)
    router = lab.router(engine, timeouts=FAST)
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: engine.serving == 1)
    lab.until(lambda: all_quiet(router))
    lab.until(lambda: not router.inner.clients, "the stalled connection being dropped")
    assert router.metric("kvhearth_router_upstream_failures_total", reason="client_stalled") == 1
    lab.until(lambda: engine.serving == 0)


def test_a_connection_that_does_not_open_in_time_is_given_up_for_another_engine(lab):
    first, second = lab.engine(), lab.engine()
    with full_listener() as port:
        router = lab.router(first, second, timeouts=FAST)
        router.inner.fleet.engines[0].port = port
        wire = router.wire()
        wire.prompt()
        status, lines, _ = wire.response()
        assert (status, dict(lines)["x-kvhearth-engine"]) == (200, "e1")
        assert router.metric("kvhearth_router_upstream_failures_total", reason="connect_timeout") == 1


# Connections to engines


def test_idle_connections_are_bounded_and_closed_before_the_engine_would(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(
        engine,
        limits=Limits(max_idle_per_engine=3),
        timeouts=Timeouts(engine_idle_seconds=0.4, sweep_seconds=0.02, drain_seconds=0.2),
    )
    wires = [router.wire() for _ in range(8)]
    for wire in wires:
        wire.prompt()
    lab.until(lambda: engine.serving == 8)
    engine.let_go(8)
    for wire in wires:
        assert wire.response()[0] == 200
    [only] = router.inner.fleet.engines
    lab.until(lambda: len(only.connections) == 3)
    lab.until(lambda: not only.connections)
    assert not only.idle


def test_an_engine_at_its_limit_is_not_picked_and_nobody_waits_where_that_is_not_wanted(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, limits=Limits(max_requests_per_engine=2), queue=Queueing(wait_seconds=0))
    wires = [router.wire() for _ in range(3)]
    for wire in wires[:2]:
        wire.prompt()
    lab.until(lambda: engine.serving == 2)
    wires[2].prompt()
    status, error = wires[2].error()
    assert (status, error["code"], error["headers"]["retry-after"]) == (503, "overloaded", "1")
    engine.let_go(2)
    for wire in wires[:2]:
        assert wire.response()[0] == 200


def once(first, *, then):
    """Behave one way for the first request and another way from then on."""
    left = [first]

    async def behave(*arguments):
        await (left.pop() if left else then)(*arguments)

    return behave


class full_listener:
    """A port that takes no more connections: a further one neither opens nor is refused."""

    def __enter__(self) -> int:
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(0)
        self.fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(self.listener.getsockname())
            self.fillers.append(filler)
        return self.listener.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        for sock in (self.listener, *self.fillers):
            sock.close()


def test_an_engine_that_closes_each_connection_at_once_keeps_nobody_waiting(lab):
    engine = lab.engine()
    router = lab.router(engine, health=NO_CHECKS)
    engine.die()

    async def accept_and_close():
        async def close(reader, writer):
            writer.transport.abort()

        engine.server = await asyncio.start_server(close, "127.0.0.1", engine.port)

    lab.engines_loop.run(accept_and_close())
    wires = [router.wire() for _ in range(10)]
    for wire in wires:
        wire.prompt()
    for wire in wires:
        assert wire.error()[0] == 502  # within the test's patience, not after the ten minutes for a first byte
    lab.until(lambda: all_quiet(router))


def test_control_characters_in_an_engines_status_line_do_not_reach_the_client(lab):
    engine = lab.engine()
    engine.behave = lab.raw(b"HTTP/1.1 200 O\0\x1b[2J\x7fK \xe9\r\nContent-Length: 2\r\n\r\nhi")
    wire = lab.router(engine).wire()
    wire.prompt()
    assert wire.until(b"\r\n") == b"HTTP/1.1 200 O[2JK \xe9"
