"""Every shape of request is routed by the ids that the engine makes of it: same prefix, same engine, whole hit."""

from __future__ import annotations

import json

import pytest

SHAPES = {
    "completions, a string": ("/v1/completions", lambda text: {"prompt": text}),
    "completions, a list of strings": ("/v1/completions", lambda text: {"prompt": [text, "another"]}),
    "completions, token ids": ("/v1/completions", lambda text: {"prompt": list(text.encode())}),
    "completions, lists of token ids": ("/v1/completions", lambda text: {"prompt": [list(text.encode()), [1, 2]]}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "chat in parts": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ),
    "chat, continued": (
        "/v1/chat/completions",
        lambda text: {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Well,"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
}


def ask(wire, path: str, fields: dict) -> tuple[str, str]:
    """Who answered, and what the router expected to be there."""
    wire.post(json.dumps({"model": "m", "max_tokens": 1, **fields}).encode(), target=path)
    status, lines, body = wire.response()
    assert status == 200, body
    told = dict(lines)
    return told["x-kvhearth-engine"], told["x-kvhearth-hit"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_seen_in_events_is_found_by_its_ids_in_every_shape(shape, emulated):
    path, fields = SHAPES[shape]
    wire = emulated.router.wire()
    prompts = [f"{number} " + "the quick brown fox " * 60 for number in range(2)]
    homes = [ask(wire, path, fields(prompt))[0] for prompt in prompts]
    emulated.until_all_told()
    for prompt, home in zip(prompts, homes, strict=True):
        engine, hit = ask(wire, path, fields(prompt))
        assert engine == home
        told = dict(part.split("=") for part in hit.split(", "))
        assert int(told["hbm"]) >= 320, "the whole prompt but its last blocks"
    assert emulated.router.metric("kvhearth_router_misses_total", reason="refused") == 0
    assert emulated.router.metric("kvhearth_router_misses_total", reason="unsupported") == 0


def test_a_prompt_that_the_engine_computed_is_a_hit_as_large_as_the_engine_says(emulated):
    """The router's expectation against the engine's own count of cached tokens."""
    wire = emulated.router.wire()
    text = "1 " + "the quick brown fox " * 60
    for path, fields in (SHAPES["completions, a string"], SHAPES["chat"]):
        ask(wire, path, fields(text))
        emulated.until_all_told()
        wire.post(json.dumps({"model": "m", "max_tokens": 1, **fields(text)}).encode(), target=path)
        _, lines, body = wire.response()
        cached = json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert f"tokens={cached}," in dict(lines)["x-kvhearth-hit"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "what is this? " * 100},
                            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                        ],
                    }
                ]
            },
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hello " * 300}],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
            },
        ),
        ("/v1/responses", {"input": "hello " * 300}),
        ("/v1/embeddings", {"input": ["hello " * 300]}),
        ("/v1/rerank", {"query": "hello " * 300, "documents": ["a", "b"]}),
    ],
    ids=["image", "tools", "responses", "embeddings", "rerank"],
)
def test_what_has_no_ids_of_a_prompt_stays_with_its_text_and_reaches_an_engine_unchanged(lab, path, fields, kv_nobody):
    engines = [lab.engine() for _ in range(3)]
    router = lab.router(*engines, policy="kv-aware", kv=kv_nobody)
    wire = router.wire()
    body = json.dumps({"model": "m", **fields}).encode()
    homes = set()
    for _ in range(3):
        wire.post(body, target=path)
        homes.add(dict(wire.response()[1])["x-kvhearth-engine"])
    assert len(homes) == 1
    sent = [request.body for engine in engines for request in engine.requests if request.target == path]
    assert sent == [body] * 3
