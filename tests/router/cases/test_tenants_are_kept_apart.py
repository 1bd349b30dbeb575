"""What one tenant can learn of another, take from it, or keep it from: nothing, with the proof beside each claim."""

from __future__ import annotations

import hashlib
import json
import logging
import time

import pytest

from kvhearth.router.config import Limits, Queueing

KEYS = {"alice": "kvh-alice-0123456789", "bob": "kvh-bob-0123456789"}
SECRET = b"secret of the operator"
PAIRS = 16
PROMPT_WORDS = 3000


@pytest.fixture
def tenants_file(tmp_path):
    def write(**more: str):
        path = tmp_path / "tenants.yaml"
        entries = [
            f'{name}: {{keys: ["sha256:{hashlib.sha256(key.encode()).hexdigest()}"]{more.get(name, "")}}}'
            for name, key in KEYS.items()
        ]
        path.write_text("tenants: {" + ", ".join(entries) + "}")
        path.chmod(0o600)
        return path

    return write


def post(wire, tenant: str, prompt: str, target: str = "/v1/completions", **more) -> tuple[int, dict, bytes]:
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, **more}).encode()
    wire.post(body, target=target, headers=f"Authorization: Bearer {KEYS[tenant]}\r\n")
    status, lines, answer = wire.response()
    return status, dict(lines), answer


def prompt(number: int, whose: str) -> str:
    return f"{whose} {number} " + " ".join(str((number * 7919 + word) % 9973) for word in range(PROMPT_WORDS))


def isolated(tenants_file):
    return tenants_file(alice=", isolation: isolated", bob=", isolation: isolated")


def times_bob_was_faster(emulated) -> int:
    """In how many pairs a prompt that Alice had sent was answered to Bob sooner than one that nobody had."""
    wire = emulated.router.wire()
    faster = 0
    for number in range(PAIRS):
        assert post(wire, "alice", prompt(number, "secret"))[0] == 200
        took = []
        for whose in ("secret", "fresh"):
            started = time.perf_counter()
            assert post(wire, "bob", prompt(number, whose))[0] == 200
            took.append(time.perf_counter() - started)
        faster += took[0] < took[1]
    return faster


def test_the_time_of_an_answer_tells_bob_what_alice_has_sent_only_where_they_share(emulate, tenants_file):
    """A sign test over 16 pairs: 15 or more of one sign come by chance once in 1,900 times."""
    shape = {"time_scale": 1.0, "num_gpu_blocks_override": 8193}
    shared = emulate(1, options={"policy": "round-robin", "tenants_file": tenants_file()}, **shape)
    assert times_bob_was_faster(shared) >= PAIRS - 1, "the test can tell a hit from a miss"
    apart = emulate(
        1, options={"policy": "round-robin", "tenants_file": isolated(tenants_file), "salt_secret": SECRET}, **shape
    )
    assert 1 < times_bob_was_faster(apart) < PAIRS - 1


def test_neither_the_engine_nor_the_index_gives_bob_a_hit_on_what_alice_has_sent(emulate, tenants_file):
    options = {"tenants_file": isolated(tenants_file), "salt_secret": SECRET}
    emulated = emulate(2, options=options)
    wire = emulated.router.wire()
    text = prompt(0, "secret")
    for _ in range(2):
        assert post(wire, "alice", text)[0] == 200
        emulated.until_all_told()
    hit = post(wire, "alice", text)[1]["x-kvhearth-hit"]
    assert "tokens=0" not in hit
    status, headers, _ = post(wire, "bob", text)
    assert (status, headers["x-kvhearth-hit"]) == (200, "tokens=0, hbm=0, dram=0, store=0")


@pytest.mark.parametrize("target", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_salt_is_the_routers_whatever_the_client_says(lab, tenants_file, target):
    engine = lab.engine()
    router = lab.router(engine, tenants_file=tenants_file(alice=", isolation: isolated"), salt_secret=SECRET)
    wire = router.wire()
    chosen = {"cache_salt": "bob's", "kv_transfer_params": {"do_remote_prefill": True}, "priority": -100}
    chosen |= {"vllm_xargs": {"kv_transfer_params": "x"}, "ec_transfer_params": {}, "request_id": "alice's"}
    for tenant in ("alice", "alice", "bob"):
        assert post(wire, tenant, "x", target, **chosen)[0] == 200
    sent = [json.loads(received.body) for received in engine.requests]
    assert sent[0]["cache_salt"] == sent[1]["cache_salt"] not in ("", "bob's")
    assert "cache_salt" not in sent[2]
    assert not any(body.keys() & (chosen.keys() - {"cache_salt"}) for body in sent)


def test_neither_does_a_header_choose_a_place_in_an_engines_queue(lab, tenants_file):
    engine = lab.engine()
    wire = lab.router(engine, tenants_file=tenants_file()).wire()
    headers = f"Authorization: Bearer {KEYS['bob']}\r\nX-Vllm-Priority: -100\r\nX-Mine: 1\r\n"
    wire.post(b'{"model": "m", "prompt": "x"}', headers=headers)
    assert wire.response()[0] == 200
    assert engine.requests[0].header("x-vllm-priority") == []
    assert engine.requests[0].header("x-mine") == ["1"]


@pytest.mark.parametrize("target", ["/v1/completions/render", "/v1/chat/completions/%72ender/"])
def test_a_salt_is_not_sent_where_the_answer_would_show_it(lab, tenants_file, target):
    engine = lab.engine()
    file = tenants_file(alice=", isolation: isolated")
    assert post(lab.router(engine, tenants_file=file, salt_secret=SECRET).wire(), "alice", "x", target)[0] == 200
    assert "cache_salt" not in json.loads(engine.requests[0].body)


@pytest.mark.parametrize(
    ("tenant", "field", "status"), [("alice", "", 400), ("bob", "", 200), ("bob", "vllm_xargs", 400)]
)
def test_a_form_cannot_carry_what_keeps_tenants_apart_or_would_bring_them_together(
    lab, tenants_file, tenant, field, status
):
    file = tenants_file(alice=", isolation: isolated")
    wire = lab.router(lab.engine(), tenants_file=file, salt_secret=SECRET).wire()
    parts = ["model"] + ([field] if field else [])
    body = "".join(f'--b\r\nContent-Disposition: form-data; name="{part}"\r\n\r\nm\r\n' for part in parts) + "--b--\r\n"
    wire.send(
        f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer {KEYS[tenant]}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    assert wire.response()[0] == status


def test_a_tenants_key_stays_with_the_router_and_engines_get_their_own(lab, tenants_file):
    engine = lab.engine()
    router = lab.router(engine, tenants_file=tenants_file(), engine_key="engine-key")
    wire = router.wire()
    assert post(wire, "alice", "x")[0] == 200
    body = b'{"model": "m", "messages": []}'
    wire.post(body, target="/v1/messages", headers=f"x-api-key: {KEYS['bob']}\r\n")
    assert wire.response()[0] == 200
    for received in engine.requests:
        assert received.header("authorization") == ["Bearer engine-key"]
        assert received.header("x-api-key") == []
    assert router.metric("kvhearth_router_tenant_requests_total", tenant="bob", outcome="admitted") == 1


def test_an_offer_of_another_protocol_does_not_lose_who_asks(lab, tenants_file):
    engine = lab.engine()
    wire = lab.router(engine, tenants_file=tenants_file(), engine_key="k").wire()
    upgrade = f"Authorization: Bearer {KEYS['alice']}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    wire.post(b'{"model": "m", "prompt": "x"}', headers=upgrade + "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n")
    assert wire.response()[0] == 200
    assert engine.requests[0].header("authorization") == ["Bearer k"]


@pytest.mark.parametrize("given", ["", "Authorization: Bearer wrong\r\n", "x-api-key: wrong\r\n"])
def test_who_has_no_key_gets_nothing_but_health(lab, tenants_file, given):
    engine = lab.engine()
    router = lab.router(engine, tenants_file=tenants_file())
    for target in ("/v1/models", "/metrics", "/debug/decision"):
        wire = router.wire()
        wire.send(f"GET {target} HTTP/1.1\r\nHost: r\r\n{given}\r\n".encode())
        assert wire.error()[0] == 401
    wire = router.wire()
    wire.post(b'{"model": "m", "prompt": "x"}', headers=given)
    assert wire.error()[0] == 401
    assert router.wire().get("/health")[0] == 200
    assert engine.requests == []


@pytest.mark.parametrize("target", ["/metrics", "/debug/decision"])
def test_a_tenant_is_not_told_of_others_by_pages_of_the_operator(lab, tenants_file, target):
    router = lab.router(lab.engine(), tenants_file=tenants_file(), admin_key="operator")
    statuses = []
    for key in (KEYS["alice"], "operator"):
        wire = router.wire()
        wire.send(f"GET {target} HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
        statuses.append(wire.response()[0])
    assert statuses == [404, 200]
    wire = router.wire()
    wire.post(b'{"model": "m", "prompt": "x"}', headers="Authorization: Bearer operator\r\n")
    assert wire.error()[0] == 401, "the operator's key is not a tenant's"


def test_a_model_that_is_not_for_a_tenant_does_not_exist_for_it(lab, tenants_file):
    router = lab.router(lab.engine("m", "other"), tenants_file=tenants_file(alice=", models: [other]"))
    wire = router.wire()
    assert post(wire, "alice", "x")[0] == 404
    assert post(wire, "bob", "x")[0] == 200
    wire.send(f"GET /v1/models HTTP/1.1\r\nHost: r\r\nAuthorization: Bearer {KEYS['alice']}\r\n\r\n".encode())
    assert [card["id"] for card in json.loads(wire.response()[2])["data"]] == ["other"]


def test_limits_hold_and_everything_is_given_back(lab, tenants_file):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, tenants_file=tenants_file(alice=", max_concurrency: 2"))
    body = b'{"model": "m", "prompt": "x"}'
    wires = [router.wire() for _ in range(3)]
    for wire in wires:
        wire.post(body, headers=f"Authorization: Bearer {KEYS['alice']}\r\n")
        time.sleep(0.05)
    status, error = wires[2].error()
    assert (status, error["code"]) == (429, "tenant_concurrency")
    wires[0].close()
    lab.until(lambda: router.metric("kvhearth_router_tenant_requests_in_flight", tenant="alice") == 1)
    engine.let_go(5)
    assert wires[1].response()[0] == 200
    assert router.metric("kvhearth_router_tenant_requests_in_flight") == 0


def test_a_greedy_tenant_does_not_keep_a_modest_one_waiting(lab, tenants_file):
    """One engine, one request at a time: Alice has ten waiting when Bob comes; he is among the next two."""
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(
        engine,
        tenants_file=tenants_file(),
        limits=Limits(max_requests_per_engine=1),
        queue=Queueing(max_waiting_requests=50),
    )
    wires = []
    for number in range(11):
        wires.append(router.wire())
        text = json.dumps({"model": "m", "prompt": f"alice {number}"}).encode()
        wires[-1].post(text, headers=f"Authorization: Bearer {KEYS['alice']}\r\n")
    lab.until(lambda: router.metric("kvhearth_router_queued_requests") == 10)
    bob = router.wire()
    bob.post(b'{"model": "m", "prompt": "bob"}', headers=f"Authorization: Bearer {KEYS['bob']}\r\n")
    lab.until(lambda: router.metric("kvhearth_router_queued_requests") == 11)
    engine.let_go(20)
    assert [wire.response()[0] for wire in (*wires, bob)] == [200] * 12
    order = [json.loads(received.body)["prompt"] for received in engine.requests]
    assert "bob" in order[1:3]


def test_a_higher_priority_goes_first(lab, tenants_file):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    file = tenants_file(bob=", priority: 10")
    router = lab.router(engine, tenants_file=file, limits=Limits(max_requests_per_engine=1))
    wires = []
    for number, tenant in enumerate(["alice", "alice", "alice", "bob"]):
        wires.append(router.wire())
        text = json.dumps({"model": "m", "prompt": f"{tenant} {number}"}).encode()
        wires[-1].post(text, headers=f"Authorization: Bearer {KEYS[tenant]}\r\n")
        lab.until(lambda number=number: router.metric("kvhearth_router_queued_requests") == number)
    engine.let_go(4)
    assert [wire.response()[0] for wire in wires] == [200] * 4
    assert json.loads(engine.requests[1].body)["prompt"] == "bob 3"


def test_keys_and_prompts_are_in_no_log_metric_or_error(lab, tenants_file, caplog):
    caplog.set_level(logging.DEBUG)
    engine = lab.engine()
    router = lab.router(
        engine, tenants_file=tenants_file(alice=", isolation: isolated"), salt_secret=SECRET, engine_key="engine-key"
    )
    wire = router.wire()
    seen = b""
    for behave in (lab.reply(), lab.reply(500, b"{}"), lab.hang_up(), lab.raw(b"not http")):
        engine.behave = behave
        seen += post(wire, "alice", "a very private prompt")[2]
    wire.post(b"no json: a very private prompt", headers=f"Authorization: Bearer {KEYS['alice']}\r\n")
    seen += wire.response()[2]
    seen += router.call(router.inner.registry.expose)
    shown = seen.decode() + caplog.text
    salt = next(iter(router.inner.tenants)).salt
    for hidden in (*KEYS.values(), "engine-key", SECRET.decode(), salt, "private"):
        assert hidden not in shown
