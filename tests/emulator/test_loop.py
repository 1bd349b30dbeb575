"""Emulated time is the cost model's, whatever the wall clock does; clients that leave take their requests along."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from kvhearth.engine.tokens import encode

PROMPT = "word " * 1000
LENGTH = len(encode(PROMPT))


@pytest.mark.parametrize("time_scale", [2.0, 200.0])
def test_latencies_are_those_of_the_cost_model_at_every_time_scale(start, time_scale: float) -> None:
    engine = start(time_scale=time_scale)
    engine.complete(PROMPT, max_tokens=6)
    cost = engine.emulator.shape.cost
    prefill = cost.step_ns([(LENGTH, 0)], 0, 0)
    decodes = [cost.step_ns([], 1, LENGTH + generated) for generated in range(1, 6)]
    assert engine.metric("vllm:time_to_first_token_seconds_sum") == pytest.approx(prefill / 1e9, rel=1e-6)
    assert engine.metric("vllm:inter_token_latency_seconds_sum") == pytest.approx(sum(decodes) / 1e9, rel=1e-6)
    assert engine.metric("vllm:inter_token_latency_seconds_count") == 5
    total = (prefill + sum(decodes)) / 1e9
    assert engine.metric("vllm:e2e_request_latency_seconds_sum") == pytest.approx(total, rel=1e-6)
    assert engine.metric("kvhearth_emulator_time_scale") == time_scale


def test_a_second_request_with_the_same_prefix_is_quicker_by_what_it_did_not_compute(start) -> None:
    engine = start()
    engine.complete(PROMPT, max_tokens=1)
    first = engine.metric("vllm:time_to_first_token_seconds_sum")
    engine.complete(PROMPT, max_tokens=1)
    second = engine.metric("vllm:time_to_first_token_seconds_sum") - first
    cached = (LENGTH - 1) // 16 * 16
    expected = engine.emulator.shape.cost.step_ns([(LENGTH - cached, cached)], 0, 0)
    assert second == pytest.approx(expected / 1e9, rel=1e-6)
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached


def test_a_conversation_finds_its_earlier_turns_in_the_cache(start) -> None:
    engine = start()
    messages = [{"role": "user", "content": "tell me something long"}]
    body = {"model": "llama-3.1-8b", "messages": messages, "max_tokens": 200}
    answer = engine.http.post("/v1/chat/completions", json=body).json()
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "and more"}]
    usage = engine.http.post("/v1/chat/completions", json=body).json()["usage"]
    # All but the last token generated was computed; full blocks of that are kept.
    seen = answer["usage"]["total_tokens"] - 1
    assert usage["prompt_tokens_details"]["cached_tokens"] == seen // 16 * 16


def test_the_state_counts_what_was_served(start) -> None:
    engine = start()
    for _ in range(3):
        engine.complete(PROMPT, max_tokens=5)
    state = engine.state()
    counters = state["counters"]
    assert counters["requests_finished"] == 3
    assert counters["generation_tokens"] == 15
    assert counters["prompt_tokens"] == 3 * LENGTH
    sources = [counters[f"prompt_tokens_{source}"] for source in ("hbm", "dram", "store", "compute")]
    assert sum(sources) == 3 * LENGTH
    assert state["running"] == state["waiting"] == 0
    assert state["time_scale"] == 20.0
    assert 0 <= state["lag_p99_seconds"] <= state["lag_max_seconds"] <= state["lag_total_seconds"]
    assert state["emulated_now_seconds"] >= engine.metric("vllm:e2e_request_latency_seconds_sum")


def test_metrics_are_vllms_by_name_and_label(start) -> None:
    engine = start(engine_id="east-0", served_model_name="llama-3.1-8b")
    engine.complete(PROMPT)
    labels = {"model_name": "llama-3.1-8b", "engine": "east-0"}
    for name, value in {
        "vllm:prompt_tokens_total": LENGTH,
        "vllm:generation_tokens_total": 4,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:num_preemptions_total": 0,
        "vllm:prefix_cache_queries_total": LENGTH,
        "vllm:prefix_cache_hits_total": 0,
        "vllm:external_prefix_cache_queries_total": 0,
        "vllm:external_prefix_cache_hits_total": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:kv_offload_load_bytes_total": 0,
        "vllm:kv_offload_store_bytes_total": 0,
        "vllm:request_prompt_tokens_sum": LENGTH,
        "vllm:request_generation_tokens_sum": 4,
        "vllm:request_params_max_tokens_sum": 4,
        "vllm:request_queue_time_seconds_count": 1,
    }.items():
        assert engine.metric(name, **labels) == value, name
    assert engine.metric("vllm:request_success_total", finished_reason="length") == 1
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == LENGTH
    assert engine.metric("kvhearth_emulator_prompt_tokens_total", source="compute", engine="east-0") == LENGTH


def test_preemption_shows_when_hbm_is_small(start) -> None:
    engine = start(num_gpu_blocks_override=41)
    answer = engine.complete([f"{name} " * 60 for name in ("aaaa", "bbbb", "cccc", "dddd")], max_tokens=120)
    assert answer["usage"]["completion_tokens"] == 480
    assert engine.metric("vllm:num_preemptions_total") > 0
    assert engine.metric("kvhearth_emulator_reprefill_tokens_total") > 0


def test_a_prompt_that_hbm_can_never_hold_does_not_start(start) -> None:
    engine = start(num_gpu_blocks_override=11, max_model_len=160)
    response = engine.http.post("/v1/completions", json={"model": "llama-3.1-8b", "prompt": "word " * 200})
    assert response.status_code == 400


@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_client_that_leaves_takes_its_request_along(start, eventually, stream: str) -> None:
    engine = start(time_scale=1.0)
    target = urlsplit(engine.emulator.url)
    body = b'{"prompt": "hello", "max_tokens": 9000, "stream": %s}' % stream.encode()
    with socket.create_connection((target.hostname, target.port)) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        eventually(lambda: engine.state()["running"] == 1)
    eventually(lambda: engine.state()["running"] == 0)
    assert engine.state()["requests_aborted"] == 1
    assert engine.metric("vllm:request_success_total", finished_reason="abort") == 1
    assert engine.metric("vllm:kv_cache_usage_perc") == 0


def test_more_open_tokens_than_it_can_keep_are_refused_and_come_free_again(start, monkeypatch) -> None:
    monkeypatch.setattr("kvhearth.emulator.loop.MAX_OPEN_TOKENS", 100)
    engine = start()
    body = {"model": "llama-3.1-8b", "prompt": "word " * 60, "max_tokens": 50}
    refused = engine.http.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "ServiceUnavailableError"
    for _ in range(3):
        engine.complete("word " * 30, max_tokens=50)


@pytest.mark.parametrize("stream", [False, True])
def test_a_defect_in_the_model_fails_calls_and_shows_in_health(start, monkeypatch, stream: bool) -> None:
    engine = start()

    def broken(self, transfers):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("kvhearth.engine.model.EngineModel.step", broken)
    body = {"model": "llama-3.1-8b", "prompt": "hi", "stream": stream}
    response = engine.http.post("/v1/completions", json=body)
    assert response.status_code == (200 if stream else 500)
    assert "a defect" in response.text
    assert engine.http.get("/health").status_code == 503
    assert engine.http.post("/v1/completions", json=body).status_code == 500


def test_streamed_pieces_hold_as_many_tokens_as_asked_for(start) -> None:
    engine = start(stream_interval=10)
    body = {"model": "llama-3.1-8b", "prompt": "hi", "max_tokens": 35, "stream": True}
    pieces = engine.http.post("/v1/completions", json=body).text.split("\n\n")
    counts = [piece.count(" ") - 1 for piece in pieces if '"choices"' in piece]  # one space is of "data: {"
    assert counts[0] == 1
    assert sum(counts) == 35
    assert all(count >= 10 for count in counts[1:-1])


def test_stopping_tells_open_streams_why_and_ends_them(start, eventually) -> None:
    engine = start(time_scale=1.0)
    target = urlsplit(engine.emulator.url)
    with socket.create_connection((target.hostname, target.port)) as client:
        body = b'{"prompt": "hello", "max_tokens": 9000, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        eventually(lambda: engine.state()["running"] == 1)
        engine.emulator.stop()
        client.settimeout(20)
        heard = b""
        while piece := client.recv(65536):
            heard += piece
    assert b"the server is shutting down" in heard
    assert b"[DONE]" in heard
