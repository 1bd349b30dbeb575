"""The operator's key shows the engines and takes them out; nobody else's does."""

from __future__ import annotations

import json

import pytest

KEY = "Authorization: Bearer operator\r\n"


def send(router, line: str, headers: str = KEY):
    wire = router.wire()
    wire.send(f"{line} HTTP/1.1\r\nHost: r\r\n{headers}Content-Length: 0\r\n\r\n".encode())
    status, _, body = wire.response()
    return status, json.loads(body)


def test_an_engine_is_drained_and_resumed(lab):
    engines = [lab.engine(), lab.engine()]
    router = lab.router(*engines, admin_key="operator")
    status, shown = send(router, "POST /engines/e0/drain")
    assert (status, shown["state"]) == (200, "draining")
    wire = router.wire()
    for _ in range(4):
        wire.prompt()
        assert wire.response()[0] == 200
    assert [len(engine.requests) for engine in engines] == [0, 4]
    assert [engine["state"] for engine in send(router, "GET /engines")[1]["engines"]] == ["draining", "healthy"]
    assert send(router, "POST /engines/e0/resume")[1]["state"] == "healthy"


def test_an_engine_is_shown_with_what_it_has(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, admin_key="operator", api_key="client")
    wire = router.wire()
    wire.post(b'{"model": "m", "prompt": "x"}', headers="Authorization: Bearer client\r\n")
    lab.until(lambda: engine.serving == 1)
    [shown] = send(router, "GET /engines")[1]["engines"]
    assert (shown["requests_in_flight"], shown["models"], shown["url"]) == (1, ["m"], engine.url)
    assert shown["breaker"] == {"state": "closed", "opened": 0}
    engine.let_go()
    assert wire.response()[0] == 200


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("POST /engines/nobody/drain", 404),
        ("POST /engines/e0/destroy", 404),
        ("POST /engines/", 404),
        ("GET /engines/e0/drain", 405),
        ("POST /engines", 405),
    ],
)
def test_what_is_no_such_thing_says_so(lab, line, status):
    assert send(lab.router(lab.engine(), admin_key="operator"), line)[0] == status


@pytest.mark.parametrize("headers", ["", "Authorization: Bearer client\r\n", "Authorization: Bearer wrong\r\n"])
def test_clients_have_no_part_in_it(lab, headers):
    router = lab.router(lab.engine(), admin_key="operator", api_key="client")
    for line in ("GET /engines", "POST /engines/e0/drain"):
        assert send(router, line, headers)[0] == 401
    assert router.metric("kvhearth_router_engines", state="draining") == 0


def test_the_operators_key_is_no_clients_key(lab):
    wire = lab.router(lab.engine(), admin_key="operator", api_key="client").wire()
    wire.post(b'{"model": "m", "prompt": "x"}', headers=KEY)
    assert wire.error()[0] == 401


def test_without_an_operators_key_the_routes_are_not_there(lab):
    assert send(lab.router(lab.engine()), "GET /engines")[0] == 404
    assert send(lab.router(lab.engine()), "POST /engines/e0/drain")[0] == 404
