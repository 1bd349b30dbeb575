"""Models by all their names: listed once each, LoRA adapters among them, and reachable by alias."""

from __future__ import annotations

import json


def names(wire) -> list[str]:
    return [card["id"] for card in json.loads(wire.get("/v1/models")[2])["data"]]


def test_an_alias_is_listed_beside_its_model_once_an_engine_has_it(lab):
    router = lab.router(lab.engine("llama"), aliases={"gpt-4": "llama", "gone": "nowhere"})
    wire = router.wire()
    assert names(wire) == ["gpt-4", "llama"]
    card = json.loads(wire.get("/v1/models/gpt-4")[2])
    assert (card["id"], card["root"]) == ("gpt-4", "llama")
    wire.send(b"GET /v1/models/none HTTP/1.1\r\nHost: r\r\n\r\n")
    assert wire.error()[0] == 404


def test_a_model_with_a_slash_in_its_name_has_its_card(lab):
    wire = lab.router(lab.engine("org/model")).wire()
    assert json.loads(wire.get("/v1/models/org/model")[2])["id"] == "org/model"
    assert json.loads(wire.get("/v1/models/org%2Fmodel")[2])["id"] == "org/model"


def test_a_request_by_alias_reaches_the_model_with_nothing_else_changed(lab):
    engine = lab.engine("llama")
    router = lab.router(engine, lab.engine("other"), aliases={"gpt-4": "llama"})
    wire = router.wire()
    wire.post(b'{"temperature": 1.50, "prompt": "h\\u00e9",  "big": 12345678901234567890, "model": "gpt-4"}')
    assert wire.response()[0] == 200
    assert engine.requests[0].body == (
        b'{"temperature":1.50,"prompt":"h\\u00e9","big":12345678901234567890,"model":"llama"}'
    )
    wire.post(b'{ "model" : "llama" }')
    assert wire.response()[0] == 200
    assert engine.requests[1].body == b'{ "model" : "llama" }'  # its own name: byte for byte
    lab.until(lambda: router.inner.buffered_bytes == 0)
    assert router.metric("kvhearth_router_requests_total", model="llama", status_class="2xx") == 2


def test_a_body_by_alias_that_no_engine_could_read_is_refused(lab):
    engine = lab.engine("llama")
    wire = lab.router(engine, aliases={"gpt-4": "llama"}).wire()
    wire.post(b'{"model": "gpt-4", "\xff": 1}')
    status, error = wire.error()
    assert (status, error["code"]) == (400, "bad_body")
    assert not engine.requests


def test_a_form_by_alias_reaches_the_model(lab):
    engine = lab.engine("whisper-large")
    wire = lab.router(engine, lab.engine("other"), aliases={"whisper": "whisper-large"}).wire()
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b\r\n\r\nfile\r\n--b--\r\n'
    body = form % b"whisper"
    wire.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: r\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        b"Authorization: Bearer k\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert wire.response()[0] == 200
    assert engine.requests[0].body == form % b"whisper-large"
    assert engine.requests[0].header("authorization") == ["Bearer k"]


def test_what_only_counts_tokens_goes_past_the_policy_and_teaches_it_nothing(lab):
    router = lab.router(lab.engine(), policy="prefix")
    wire = router.wire()
    for path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
        wire.post(json.dumps({"model": "m", "prompt": "x" * 4096, "tokens": [1]}).encode(), target=path)
        assert wire.response()[0] == 200
    assert router.metric("kvhearth_router_prefix_index_pieces") == 0
