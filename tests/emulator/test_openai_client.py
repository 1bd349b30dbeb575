"""The official OpenAI client works against an emulated engine."""

from __future__ import annotations

import openai
import pytest

from kvhearth.engine.tokens import encode


@pytest.fixture
def client(engine):
    with openai.OpenAI(base_url=f"{engine.emulator.url}/v1", api_key="unused", max_retries=0, timeout=20) as made:
        yield made


def test_a_chat_streams_through_the_client(client) -> None:
    stream = client.chat.completions.create(
        model="llama-3.1-8b",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        max_completion_tokens=12,
        temperature=0.2,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for piece in stream:
        text += "".join(choice.delta.content or "" for choice in piece.choices)
        usage = piece.usage or usage
    assert len(encode(text)) == 12
    assert usage.completion_tokens == 12


def test_completions_and_models_work_through_the_client(client) -> None:
    assert [model.id for model in client.models.list()] == ["llama-3.1-8b"]
    answer = client.completions.create(model="llama-3.1-8b", prompt="hi", max_tokens=3, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 3


def test_refusals_are_the_clients_own_errors(client) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="llama-3.1-8b", prompt="hi", n=3)
    assert caught.value.param == "n"
