"""What a client of an emulated engine sees over HTTP: vLLM's endpoints, shapes and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhearth.engine.tokens import encode


def events(text: str) -> list[Any]:
    """The data of a server-sent event stream, JSON decoded but for the end mark."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_the_model_is_listed_with_its_context_length(engine) -> None:
    card = engine.http.get("/v1/models").json()["data"][0]
    assert card["id"] == "llama-3.1-8b"
    assert card["max_model_len"] == 16_000
    assert engine.http.get("/v1/models/llama-3.1-8b").json() == card
    assert engine.http.get("/v1/models/other").status_code == 404


def test_health_and_version_answer(engine) -> None:
    assert engine.http.get("/health").status_code == 200
    assert engine.http.get("/version").json()["version"].startswith("0.32")


def test_a_completion_has_the_tokens_asked_for_and_usage_sums(engine) -> None:
    answer = engine.complete("one two three", max_tokens=7)
    choice, usage = answer["choices"][0], answer["usage"]
    assert answer["object"] == "text_completion"
    assert choice["finish_reason"] == "length"
    assert len(encode(choice["text"])) == 7
    assert usage["completion_tokens"] == 7
    assert usage["prompt_tokens"] == len(encode("one two three"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + 7


def test_a_stream_joins_to_the_same_text_as_the_whole_answer(engine) -> None:
    body = {"model": "llama-3.1-8b", "prompt": "tell me", "max_tokens": 9}
    whole = engine.complete("tell me", max_tokens=9)
    response = engine.http.post(
        "/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, usage, done = events(response.text)
    assert done == "[DONE]"
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    assert len({piece["id"] for piece in pieces}) == 1


def test_usage_can_come_with_every_piece(engine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "llama-3.1-8b", "prompt": "hi", "max_tokens": 5, "stream": True, "stream_options": options}
    *pieces, total, _ = events(engine.http.post("/v1/completions", json=body).text)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == total["usage"]["completion_tokens"] == 5


def test_without_stream_options_a_stream_has_no_usage(engine) -> None:
    body = {"model": "llama-3.1-8b", "prompt": "hi", "max_tokens": 3, "stream": True}
    assert "usage" not in engine.http.post("/v1/completions", json=body).text


def test_a_chat_streams_role_content_and_reason(engine) -> None:
    body = {
        "model": "llama-3.1-8b",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_completion_tokens": 4,
        "stream": True,
    }
    *pieces, done = events(engine.http.post("/v1/chat/completions", json=body).text)
    assert done == "[DONE]"
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len(encode("".join(delta["content"] for delta in deltas))) == 4
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert {piece["object"] for piece in pieces} == {"chat.completion.chunk"}


def test_a_chat_without_a_limit_ends_of_itself(engine) -> None:
    body = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hello"}]}
    choice = engine.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert encode(choice["message"]["content"])


def test_token_ids_are_a_prompt_like_their_text(engine) -> None:
    text = engine.complete("same words here")["choices"][0]["text"]
    ids = encode("same words here")
    assert engine.complete(ids)["choices"][0]["text"] == text
    assert engine.complete([ids])["choices"][0]["text"] == text
    assert engine.complete(["same words here"])["choices"][0]["text"] == text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_give_choices_by_index(engine, stream: bool) -> None:
    prompts = ["first prompt", "second prompt", "third prompt"]
    alone = [engine.complete(prompt)["choices"][0]["text"] for prompt in prompts]
    body = {"model": "llama-3.1-8b", "prompt": prompts, "max_tokens": 4, "stream": stream}
    response = engine.http.post("/v1/completions", json=body)
    texts = ["", "", ""]
    for answer in events(response.text)[:-1] if stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == alone


def test_rendering_tells_the_token_ids_that_generating_would_compute(engine) -> None:
    completion = {"model": "llama-3.1-8b", "prompt": ["héllo wörld", "again"], "max_tokens": 5}
    first, second = engine.http.post("/v1/completions/render", json=completion).json()
    assert first["token_ids"] == engine.http.post("/tokenize", json={"prompt": "héllo wörld"}).json()["tokens"]
    assert second["token_ids"] != first["token_ids"]
    assert second["sampling_params"]["max_tokens"] == 5
    messages = [{"role": "user", "content": "hi"}]
    chat = engine.http.post("/v1/chat/completions/render", json={"model": "llama-3.1-8b", "messages": messages}).json()
    assert chat["token_ids"] == engine.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert engine.http.post("/v1/completions/render", json={"model": "llama-3.1-8b"}).status_code == 400


def test_tokenize_and_detokenize_are_each_others_reverse(engine) -> None:
    told = engine.http.post("/tokenize", json={"prompt": "héllo wörld\n", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 16_000
    assert engine.http.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": "héllo wörld\n"}
    chat = engine.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert chat["token_strs"] is None
    assert chat["count"] > 1


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_tokenize_gives_the_tokens_that_the_chat_endpoint_counts(engine, shape: dict[str, bool]) -> None:
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "well"}]
    body = {"model": "llama-3.1-8b", "messages": messages, **shape}
    told = engine.http.post("/tokenize", json=body).json()
    answer = engine.http.post("/v1/chat/completions", json={**body, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == told["count"]
    text = engine.http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert text.endswith("<|assistant|>") == (not shape)
    assert text.endswith("well") == ("continue_final_message" in shape)


def test_a_message_cannot_be_continued_and_answered_at_once(engine) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}
    for path in ("/tokenize", "/v1/chat/completions"):
        assert engine.http.post(path, json=body).json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "gpt-4"}, 404, "model"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 99_999}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"n": 2}, 400, "n"),
        ({"stop": ["\n"]}, 400, "stop"),
        ({"logprobs": 0}, 400, "logprobs"),
        ({"echo": True}, 400, "echo"),
        ({"min_tokens": 9}, 400, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [1, "a"]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": ["a"] * 129}, 400, "prompt"),
        ({"prompt": "word " * 16_001}, 400, "input_tokens"),
    ],
)
def test_what_is_not_served_is_refused_in_openais_form_naming_the_field(
    engine, change: dict[str, Any], status: int, param: str
) -> None:
    response = engine.http.post(
        "/v1/completions", json={"model": "llama-3.1-8b", "prompt": "a", "max_tokens": 4, **change}
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert error["code"] == status
    assert error["message"]


def test_a_prompt_beyond_the_context_is_refused_in_vllms_words(engine) -> None:
    response = engine.http.post("/v1/completions", json={"model": "llama-3.1-8b", "prompt": "word " * 16_001})
    message = response.json()["error"]["message"]
    assert message.startswith("This model's maximum context length is 16000 tokens. However, your prompt contains")
    assert "16002 input tokens" in message


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 1, "messages": 1, "tokens": "x"}', b"[" * 100_000]
)
def test_a_body_that_is_no_request_is_a_400(engine, raw: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = engine.http.post(path, content=raw)
        assert response.status_code == 400, path
        assert response.json()["error"]["type"] == "BadRequestError"


def test_a_body_without_end_is_cut_off(engine) -> None:
    response = engine.http.post("/v1/completions", content=b" " * (3 << 20))
    assert response.status_code == 413


def test_unknown_paths_and_methods_are_refused_in_the_same_form(engine) -> None:
    assert engine.http.get("/v1/embeddings").json()["error"]["code"] == 404
    assert engine.http.get("/v1/completions").json()["error"]["code"] == 405


def test_only_bearers_of_the_key_reach_the_model_when_there_is_one(start) -> None:
    engine = start(api_key="secret")
    assert engine.http.get("/v1/models").status_code == 401
    assert engine.http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert engine.http.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    assert engine.http.post("/reset_prefix_cache").status_code == 401
    for open_to_all in ("/health", "/metrics", "/emulator/state"):
        assert engine.http.get(open_to_all).status_code == 200


def test_resetting_the_prefix_cache_forgets_what_was_computed(start) -> None:
    engine = start()
    prompt = "word " * 100
    engine.complete(prompt)
    assert engine.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert engine.http.post("/reset_prefix_cache").json() == {"success": True}
    assert engine.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_cache_salt_keeps_equal_prompts_apart(start) -> None:
    engine = start()
    prompt = "word " * 100
    engine.complete(prompt, cache_salt="a")
    assert engine.complete(prompt, cache_salt="b")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert engine.complete(prompt, cache_salt="a")["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
