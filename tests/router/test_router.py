"""The front door as its users and operators meet it: routes, models, policies, keys, load, metrics, start and stop."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import openai
import pytest

from kvhearth.errors import UserError
from kvhearth.metrics import all_metrics
from kvhearth.router.config import EventSource, HealthChecks, KvSettings, Limits, RouterConfig, Timeouts
from kvhearth.router.router import Router

SLOW_CHECKS = HealthChecks(interval_seconds=1000)


# Routes


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/rerank",
        "/rerank",
        "/score",
        "/tokenize",
        "/detokenize",
    ],
)
def test_posts_are_passed_on_by_model(lab, path):
    first, second = lab.engine("a"), lab.engine("b")
    wire = lab.router(first, second).wire()
    wire.post(b'{"model": "b", "tokens": [1], "text": "x"}', target=path)
    status, lines, _ = wire.response()
    assert (status, dict(lines)["x-kvhearth-engine"]) == (200, "e1")
    assert [request.target for request in second.requests] == [path]
    assert not first.requests


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/../sleep", 404),
        ("POST", "/v1", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
def test_other_routes_are_refused_and_reach_no_engine(lab, method, path, status):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.send(f'{method} {path} HTTP/1.1\r\nHost: r\r\nContent-Length: 13\r\n\r\n{{"model":"m"}}'.encode())
    assert wire.error()[0] == status
    assert wire.get("/health")[0] == 200
    assert not engine.requests


def test_models_are_those_of_all_engines_each_once(lab):
    router = lab.router(lab.engine("a", "b"), lab.engine("b", "c"))
    status, _, body = router.wire().get("/v1/models")
    page = json.loads(body)
    assert (status, page["object"], [card["id"] for card in page["data"]]) == (200, "list", ["a", "b", "c"])


def test_an_unknown_model_is_404_in_openais_form(lab):
    wire = lab.router(lab.engine()).wire()
    wire.prompt(model="gpt-9")
    status, error = wire.error()
    assert (status, error["code"], error["param"], error["type"]) == (
        404,
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    assert "gpt-9" in error["message"]


def test_a_model_whose_engines_are_all_down_is_503_with_retry_after_and_never_404(lab):
    gone, other = lab.engine("gone"), lab.engine("other")
    router = lab.router(gone, other)
    gone.die()
    lab.until(lambda: len(router.inner.fleet.healthy()) == 1)
    wire = router.wire()
    wire.prompt(model="gone")
    status, error = wire.error()
    assert (status, error["code"], error["headers"]["retry-after"]) == (503, "no_healthy_engine", "1")
    wire.prompt(model="other")
    assert wire.response()[0] == 200


def test_while_an_engine_has_never_told_its_models_none_is_said_not_to_exist(lab):
    late, other = lab.engine("late"), lab.engine("other")
    late.die()
    router = lab.router(late, other)
    wire = router.wire()
    wire.prompt(model="late")
    assert wire.error()[0] == 503
    late.start()
    lab.until(lambda: len(router.inner.fleet.healthy()) == 2)
    wire.prompt(model="late")
    assert wire.response()[0] == 200
    wire.prompt(model="neither")
    assert wire.error()[0] == 404


def test_without_a_model_the_only_one_is_meant(lab):
    wire = lab.router(lab.engine("only")).wire()
    wire.post(b'{"prompt": "x"}')
    assert wire.response()[0] == 200
    wire = lab.router(lab.engine("a", "b")).wire()
    wire.post(b'{"prompt": "x"}')
    status, error = wire.error()
    assert (status, error["param"]) == (400, "model")


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (b"", "not JSON", None),
        (b"{", "not JSON", None),
        (b'{"model": "m", "prompt": "\xff"}', "not JSON", None),
        (b"[1, 2]", "object", None),
        (b'{"model": 5}', "str", "model"),
        (b'{"model": "m", "prompt": ' + b"[" * 100_000, "nested", None),
    ],
    ids=["empty", "cut", "utf-8", "array", "model", "deep"],
)
def test_a_bad_body_is_400_and_says_what_is_wrong(lab, body, said, param):
    engine = lab.engine()
    router = lab.router(engine)
    wire = router.wire()
    wire.post(body)
    status, error = wire.error()
    assert (status, error["code"], error["param"]) == (400, "bad_body", param)
    assert said in error["message"]
    assert not engine.requests
    wire.prompt()  # the connection goes on
    assert wire.response()[0] == 200
    lab.until(lambda: router.inner.buffered_bytes == 0)


# Health


def test_health_is_200_with_an_engine_and_503_without(lab):
    engine = lab.engine()
    router = lab.router(engine)
    wire = router.wire()
    assert wire.get("/health")[0] == 200
    engine.die()
    lab.until(lambda: not router.inner.fleet.healthy())
    wire.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    status, error = wire.error()
    assert (status, error["headers"]["retry-after"]) == (503, "1")
    engine.start()
    lab.until(lambda: router.inner.fleet.healthy())
    assert wire.get("/health")[0] == 200


def test_health_checks_leave_the_load_alone(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine)
    wires = [router.wire() for _ in range(5)]
    for wire in wires:
        wire.prompt("x" * 400)
    lab.until(lambda: engine.serving == 5)
    probes = engine.probes
    lab.until(lambda: engine.probes > probes + 5)
    assert router.metric("kvhearth_router_requests_in_flight", engine="e0") == 5
    assert router.metric("kvhearth_router_in_flight_tokens", engine="e0") == 500
    engine.let_go(5)
    for wire in wires:
        assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_requests_in_flight", engine="e0") == 0
    assert router.metric("kvhearth_router_in_flight_tokens", engine="e0") == 0


# Policies


def test_case_10_round_robin_alternates_for_each_model_on_its_own(lab):
    engines = [lab.engine("a"), lab.engine("a"), lab.engine("b"), lab.engine("b")]
    wire = lab.router(*engines, policy="round-robin").wire()
    seen = {"a": [], "b": []}
    for model in "abab" + "aabb":
        wire.prompt(model=model)
        seen[model].append(dict(wire.response()[1])["x-kvhearth-engine"])
    assert seen == {"a": ["e0", "e1", "e0", "e1"], "b": ["e2", "e3", "e2", "e3"]}


def test_case_10_round_robin_alternates_for_each_model_when_engines_serve_both(lab):
    wire = lab.router(lab.engine("a", "b"), lab.engine("a", "b"), policy="round-robin").wire()
    seen = {"a": [], "b": []}
    for model in "abababab":
        wire.prompt(model=model)
        seen[model].append(dict(wire.response()[1])["x-kvhearth-engine"])
    assert seen == {"a": ["e0", "e1", "e0", "e1"], "b": ["e0", "e1", "e0", "e1"]}


SHAPES = {
    "completions, string": ("/v1/completions", lambda text: {"prompt": text}),
    "completions, strings": ("/v1/completions", lambda text: {"prompt": [text, "another"]}),
    "completions, token ids": ("/v1/completions", lambda text: {"prompt": list(text.encode())}),
    "completions, lists of token ids": ("/v1/completions", lambda text: {"prompt": [list(text.encode())]}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "chat with parts": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ),
    "chat with an image": (
        "/v1/chat/completions",
        lambda text: {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": text},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                    ],
                }
            ]
        },
    ),
    "chat with tools": (
        "/v1/chat/completions",
        lambda text: {
            "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
            "messages": [{"role": "user", "content": "go"}],
        },
    ),
    "chat, continued": (
        "/v1/chat/completions",
        lambda text: {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Well,"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "responses": ("/v1/responses", lambda text: {"instructions": text, "input": "go"}),
    "responses, items": ("/v1/responses", lambda text: {"input": [{"role": "user", "content": text}]}),
    "embeddings": ("/v1/embeddings", lambda text: {"input": [text]}),
    "rerank": ("/v1/rerank", lambda text: {"query": text, "documents": ["a", "b"]}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_case_7_every_shape_of_request_is_routed_by_its_content(lab, shape):
    path, fields = SHAPES[shape]
    wire = lab.router(*[lab.engine() for _ in range(3)], policy="prefix").wire()
    prompts = [f"{number} " * 800 for number in range(4)]
    homes: dict[str, set[str]] = {}
    for turn in range(3):
        for prompt in prompts:
            wire.post(json.dumps({"model": "m", **fields(prompt), "seed": turn}).encode(), target=path)
            homes.setdefault(prompt, set()).add(dict(wire.response()[1])["x-kvhearth-engine"])
    assert all(len(engines) == 1 for engines in homes.values())  # same content, same engine
    assert len(set.union(*homes.values())) == 3  # different content, all engines


def test_case_15_tenants_and_adapters_do_not_count_as_each_others_prefix(lab):
    router = lab.router(lab.engine("m", "lora"), policy="prefix")
    wire = router.wire()

    def hits(**fields: str) -> float:
        before = router.metric("kvhearth_router_prefix_pieces_total", result="hit")
        wire.post(json.dumps({"model": "m", "prompt": "x" * 2560, **fields}).encode())
        assert wire.response()[0] == 200
        return router.metric("kvhearth_router_prefix_pieces_total", result="hit") - before

    assert hits() == 0
    assert hits() == 10
    assert hits(cache_salt="tenant-a") == 0
    assert hits(cache_salt="tenant-b") == 0
    assert hits(model="lora") == 0
    assert hits(cache_salt="tenant-a") == 10


def test_an_engine_that_was_down_is_not_believed_to_hold_anything(lab):
    engine = lab.engine()
    router = lab.router(engine, policy="prefix")
    wire = router.wire()
    wire.prompt("x" * 2560)
    assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_prefix_index_pieces") == 10
    engine.die()
    lab.until(lambda: not router.inner.fleet.healthy())
    assert router.metric("kvhearth_router_prefix_index_pieces") == 0


# Load


def test_case_6_150_slow_requests_at_once_reach_the_engine_as_150(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine)
    wires = [router.wire() for _ in range(150)]
    for wire in wires:
        wire.prompt()
    lab.until(lambda: engine.serving == 150)
    engine.let_go(150)
    assert [wire.response()[0] for wire in wires] == [200] * 150


def test_case_4_with_200_open_streams_health_still_answers_and_each_gets_its_own_end(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n", b"data: [DONE]\n\n"], gated=True)
    router = lab.router(engine)
    wires = [router.wire() for _ in range(200)]
    for wire in wires:
        wire.prompt()
    lab.until(lambda: engine.serving == 200)
    assert router.wire().get("/health")[0] == 200
    assert router.metric("kvhearth_router_exchanges") == 200
    engine.let_go(400)
    for wire in wires:
        assert wire.response()[2] == b"data: 1\n\ndata: [DONE]\n\n"
    assert router.metric("kvhearth_router_exchanges") == 0


def test_requests_in_flight_are_bounded(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, limits=Limits(max_requests_in_flight=2))
    wires = [router.wire() for _ in range(3)]
    for wire in wires[:2]:
        wire.prompt()
    lab.until(lambda: engine.serving == 2)
    wires[2].prompt()
    status, error = wires[2].error()
    assert (status, error["code"], error["headers"]["retry-after"]) == (503, "overloaded", "1")
    engine.let_go(3)
    assert wires[0].response()[0] == wires[1].response()[0] == 200
    wires[2].prompt()
    assert wires[2].response()[0] == 200


def test_case_3_after_the_load_every_table_is_empty_and_every_gauge_0(lab):
    engines = [lab.engine(), lab.engine()]
    engines[0].behave = lab.events([b"data: 1\n\n"] * 20)
    router = lab.router(*engines, policy="prefix")

    def client(number: int) -> None:
        wire = router.wire()
        for turn in range(25):
            wire.prompt(f"{number} {turn} " * 100)
            assert wire.response()[0] == 200
        wire.prompt("left behind")
        wire.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lab.until(lambda: not router.inner.clients)
    for gauge in ("requests_in_flight", "in_flight_tokens", "exchanges", "buffered_bytes"):
        assert router.metric(f"kvhearth_router_{gauge}") == 0, gauge
    assert router.metric("kvhearth_router_requests_total", status_class="2xx") >= 200


# Metrics


def test_the_metrics_page_counts_what_happened(lab):
    engine = lab.engine()
    router = lab.router(engine, policy="prefix")
    wire = router.wire()
    for _ in range(3):
        wire.prompt("x" * 1000)
        assert wire.response()[0] == 200
    wire.prompt(model="unknown")
    assert wire.error()[0] == 404
    metric = router.metric
    assert metric("kvhearth_router_requests_total", model="m", engine="e0", status_class="2xx", policy="prefix") == 3
    assert metric("kvhearth_router_requests_total", model="", engine="", status_class="4xx") == 1
    assert metric("kvhearth_router_refusals_total", code="model_not_found") == 1
    assert metric("kvhearth_router_time_to_first_byte_seconds_count", model="m") == 3
    assert metric("kvhearth_router_request_duration_seconds_count", model="m") == 3
    assert metric("kvhearth_router_decision_seconds_count", policy="prefix") == 3
    assert metric("kvhearth_router_prefix_pieces_total", result="hit") == 6
    assert metric("kvhearth_router_prefix_pieces_total", result="miss") == 3
    assert metric("kvhearth_router_engines", state="healthy") == 1
    lab.until(lambda: metric("kvhearth_router_client_connections") == 1)


def test_every_metric_that_is_defined_is_on_the_page(lab, tmp_path):
    engine = lab.engine()
    engine.behave = lab.hang_up()
    router = lab.router(engine, lab.engine())
    wire = router.wire()
    for model in ("m", "m", "unknown"):
        wire.prompt(model=model)
        wire.response()
    kv = lab.router(engine, policy="kv-aware", kv=KvSettings(events={"e0": EventSource("tcp://127.0.0.1:1")}))
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {}")
    file.chmod(0o600)
    tenants = lab.router(engine, tenants_file=file)
    pages = [each.call(each.inner.registry.expose).decode() for each in (router, kv, tenants)]
    described = {line.split()[2] for page in pages for line in page.splitlines() if line.startswith("# HELP ")}
    wanted = {m.exposed_name for m in all_metrics() if m.name.startswith("kvhearth_router_")}
    missing = wanted - described
    assert not missing


# Keys


def test_with_a_key_every_route_but_health_wants_it(lab):
    engine = lab.engine()
    router = lab.router(engine, api_key="sk-secret")
    for headers in ("", "Authorization: Bearer wrong\r\n", "Authorization: Basic sk-secret\r\n"):
        wire = router.wire()
        wire.post(b'{"model":"m"}', headers=headers)
        status, error = wire.error()
        assert (status, error["code"], error["headers"]["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert "sk-secret" not in error["message"]
    for page in ("/v1/models", "/metrics"):
        assert router.wire().get(page)[0] == 401
    assert router.wire().get("/health")[0] == 200
    assert not engine.requests
    wire = router.wire()
    wire.post(b'{"model":"m"}', headers="Authorization: Bearer sk-secret\r\n")
    assert wire.response()[0] == 200
    assert engine.requests[0].header("authorization") == ["Bearer sk-secret"]


def test_health_checks_send_the_key_to_engines(lab):
    engine = lab.engine()
    lab.router(engine, api_key="sk-secret")
    assert engine.probe_heads
    assert all(b"\r\nauthorization: Bearer sk-secret\r\n" in head for head in engine.probe_heads)


# Start and stop


def test_a_busy_port_is_said_in_one_line(lab):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = RouterConfig(engines=[("e", "http://127.0.0.1:1")], listen_port=port)
        with pytest.raises(UserError, match=rf"listen 127\.0\.0\.1:{port}: the port is in use; stop"):
            lab.router_loop.run(Router(config).start())


def test_an_address_of_another_machine_is_refused(lab):
    config = RouterConfig(engines=[("e", "http://127.0.0.1:1")], listen_host="192.0.2.1", listen_port=0, api_key="k")
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        lab.router_loop.run(Router(config).start())


def test_stopping_lets_streams_finish_and_takes_no_new_requests(lab):
    engine = lab.engine()
    engine.behave = lab.events([b"data: 1\n\n"] * 2, gated=True)
    router = lab.router(engine, timeouts=Timeouts(drain_seconds=10, sweep_seconds=0.02))
    idle, busy = router.wire(), router.wire()
    assert idle.get("/health")[0] == 200
    busy.prompt()
    engine.let_go()
    busy.head()
    assert busy.chunk() == b"data: 1\n\n"
    stopping = asyncio.run_coroutine_threadsafe(router.inner.stop(), lab.router_loop.loop)
    assert idle.rest() == b""
    with pytest.raises(ConnectionRefusedError):
        lab.until(lambda: router.wire().close())
    engine.let_go()
    assert busy.chunk() == b"data: 1\n\n"
    assert busy.chunk() == b""
    stopping.result(10)
    assert busy.rest() == b""
    assert not router.inner.clients


def test_stopping_cuts_what_does_not_end_in_time(lab):
    engine = lab.engine()
    engine.behave = lab.hang()
    router = lab.router(engine, timeouts=Timeouts(drain_seconds=0.1, sweep_seconds=0.02))
    wire = router.wire()
    wire.prompt()
    lab.until(lambda: engine.serving == 1)
    lab.router_loop.run(router.inner.stop())
    assert wire.rest() == b""
    lab.until(lambda: engine.disconnects == 1)


# The clients that people use


CHUNK = {
    "id": "c",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "tok"}, "finish_reason": None}],
}


def test_the_openai_client_streams_lists_models_and_reads_errors(lab):
    engine = lab.engine()
    engine.behave = lab.events([f"data: {json.dumps(CHUNK)}\n\n".encode()] * 5 + [b"data: [DONE]\n\n"])
    router = lab.router(engine)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        messages = [{"role": "user", "content": "hi"}]
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        assert [chunk.choices[0].delta.content for chunk in stream] == ["tok"] * 5
        assert [model.id for model in client.models.list()] == ["m"]
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="x", messages=messages)
        assert caught.value.code == "model_not_found"


def test_the_openai_client_sees_a_stream_that_was_cut(lab):
    engine = lab.engine()
    engine.behave = lab.events([f"data: {json.dumps(CHUNK)}\n\n".encode()], die=True)
    router = lab.router(engine)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            list(stream)


def test_case_12_a_form_is_passed_on_by_its_model_with_its_authorization(lab):
    first, second = lab.engine("a"), lab.engine("b")
    router = lab.router(first, second)
    got = httpx.post(
        f"{router.url}/v1/audio/transcriptions",
        data={"language": "en", "model": "b"},
        files={"file": ("model.wav", b"\r\n\r\nname=model\x00\xff" * 1000)},
        headers={"Authorization": "Bearer sk-1"},
    )
    assert (got.status_code, got.headers["x-kvhearth-engine"]) == (200, "e1")
    [received] = second.requests
    assert received.header("authorization") == ["Bearer sk-1"]
    assert received.header("content-type")[0].startswith("multipart/form-data; boundary=")
    assert received.body.count(b"name=model\x00\xff") == 1000


@pytest.mark.parametrize(
    "target", ["/v1/load%5Flora_adapter", "/v1/load_lora_adapter/", "/v1/%75nload_lora_adapter?x=1", "/v1/%2e%2e/reset"]
)
def test_a_route_that_is_not_forwarded_is_not_forwarded_however_it_is_written(lab, target):
    engine = lab.engine()
    wire = lab.router(engine).wire()
    wire.post(b'{"model":"m"}', target=target)
    assert wire.error()[0] == 404
    assert not engine.requests


def test_a_fault_of_the_router_itself_is_answered_logged_and_leaves_nothing_behind(lab, monkeypatch, caplog):
    router = lab.router(lab.engine())
    wire = router.wire()

    def fail(route, views):
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(router.inner.policy, "pick", fail)
        wire.prompt()
        status, error = wire.error()
        assert (status, error["code"]) == (500, "internal")
    assert "ZeroDivisionError" in caplog.text
    wire.prompt()
    assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_refusals_total", code="internal") == 1
    assert router.metric("kvhearth_router_buffered_bytes") == 0


def test_deadlines_are_kept_after_a_look_at_them_has_failed(lab, monkeypatch):
    engine = lab.engine()
    engine.behave = lab.hang()
    router = lab.router(engine, timeouts=Timeouts(first_byte_seconds=0.3, sweep_seconds=0.02))
    failed = []

    def fail(client):
        failed.append(client)
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr("kvhearth.router.client.ClientConnection.expired", fail)
        idle = router.wire()
        assert idle.get("/health")[0] == 200
        for client in router.inner.clients:
            client.deadline = 0.0
        lab.until(lambda: failed)
    wire = router.wire()
    wire.prompt()
    assert wire.error()[0] == 504
