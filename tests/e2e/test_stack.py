"""The main path as a user walks it: a stack, the official OpenAI client, a second engine that finds KV in the store."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest

from kvhearth.control import LocalStack
from kvhearth.engine.tokens import decode, encode, output_tokens, prompt_seed
from kvhearth.metrics import parse_exposition
from kvhearth.planner.workload import Segment

from .conftest import MODEL, small_stack

PROMPT = Segment(42, 640).text()


def client(running: LocalStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.router_url}/v1", api_key="none", timeout=30, max_retries=0)


def test_the_openai_client_streams_a_chat_through_the_router(running: LocalStack) -> None:
    with client(running) as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        stream = api.chat.completions.create(
            model=MODEL,
            messages=[{"role": "system", "content": PROMPT}, {"role": "user", "content": "Hello"}],
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usage = chunks[-1].usage
    assert len(encode(text)) == 24
    assert len(chunks) > 4
    assert usage is not None
    assert usage.completion_tokens == 24
    assert usage.prompt_tokens > 640


def test_a_completion_is_what_the_emulated_model_answers(running: LocalStack) -> None:
    with client(running) as api:
        answer = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12)
        again = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12)
    expected = decode(output_tokens(prompt_seed(encode(PROMPT)), 12))
    assert answer.choices[0].text == again.choices[0].text == expected


def test_errors_reach_the_client_in_its_own_form(running: LocalStack) -> None:
    with client(running) as api:
        with pytest.raises(openai.NotFoundError, match="nobody"):
            api.completions.create(model="nobody", prompt="x", max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="max"):
            api.completions.create(model=MODEL, prompt="word " * 20_000, max_tokens=1)


def test_what_one_engine_prefilled_the_other_takes_from_the_store(tmp_path: Path) -> None:
    with LocalStack(small_stack(policy="round-robin"), tmp_path) as running:
        assert running.wait_ready()
        with client(running) as api:
            served = []
            for _ in range(2):
                raw = api.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=4)
                served.append(raw.headers["x-kvhearth-engine"])
                wait_for_puts(running, served[0])
        assert sorted(served) == ["engine-0", "engine-1"]
        second = counters(running, served[1])
        assert second["prompt_tokens_store"] == 639
        assert second["prompt_tokens_compute"] == 1
        page = parse_exposition(httpx.get(running.metrics_urls[served[1]], timeout=5).text)
        (hits,) = page["vllm:external_prefix_cache_hits_total"].values()
        assert hits == 640  # vLLM counts the whole chunks, though the last token is computed once more
        store = parse_exposition(httpx.get(running.metrics_urls["store"], timeout=5).text)
        (items,) = store["kvhearth_store_items"].values()
        assert items >= 40


def counters(running: LocalStack, engine: str) -> dict[str, int]:
    state = httpx.get(f"{running.engine_urls[engine]}/emulator/state", timeout=5).json()
    return dict(state["counters"])


def wait_for_puts(running: LocalStack, engine: str) -> None:
    """The answer comes before the last chunk has reached the store; poll until all of the prompt's 40 have."""
    for _ in range(200):
        if counters(running, engine)["put_bytes"] >= 40 * 16 * 131_072:
            return
    raise AssertionError("the prompt's chunks did not reach the store")
