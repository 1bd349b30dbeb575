"""What of each API's request becomes tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kvhearth.router.tokens.parity import QUESTIONS
from kvhearth.router.tokens.shapes import CHAT, Chat, MultiModal, Text, asked_of

TOOL = {"type": "function", "function": {"name": "f"}}
ANSWER = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]}
HELLO = {"role": "user", "content": "hello"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}


@pytest.mark.parametrize(
    ("path", "fields", "asked"),
    [
        ("/v1/completions", {"prompt": "a"}, Text("a")),
        ("/v1/completions", {"prompt": ["a", "b"]}, Text("a")),
        ("/v1/completions", {"prompt": [1, 2]}, [1, 2]),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, [1, 2]),
        ("/v1/completions", {"prompt": "a", "add_special_tokens": False}, Text("a", special=False)),
        ("/v1/embeddings", {"input": ["a"]}, Text("a")),
        (CHAT, {"messages": [HELLO]}, Chat([HELLO])),
        (
            CHAT,
            {"messages": [HELLO], "tools": [TOOL], "tool_choice": "none", "continue_final_message": True},
            Chat([HELLO], [TOOL], continued=True),
        ),
        (CHAT, {"messages": [HELLO], "add_special_tokens": True}, Chat([HELLO], special=True)),
        (
            CHAT,
            {"messages": [HELLO], "reasoning_effort": "none", "chat_template_kwargs": {"a": 1}, "documents": []},
            Chat([HELLO], None, {"a": 1, "enable_thinking": False, "reasoning_effort": "none", "documents": []}),
        ),
        ("/v1/responses", {"input": "hello"}, Chat([HELLO])),
        ("/v1/responses", {"input": [HELLO]}, Chat([HELLO])),
        (
            "/v1/messages",
            {"system": "be brief", "messages": [HELLO]},
            Chat([{"role": "system", "content": "be brief"}, HELLO]),
        ),
        (
            "/v1/responses",
            {
                "input": [{**HELLO, "type": "message", "id": "m"}],
                "instructions": "be brief",
                "reasoning": {"effort": "low"},
            },
            Chat(
                [{"role": "system", "content": "be brief"}, HELLO],
                None,
                {"enable_thinking": True, "reasoning_effort": "low"},
            ),
        ),
        ("/v1/responses", {"input": [HELLO, ANSWER]}, Chat([HELLO, {"role": "assistant", "content": "a"}])),
        (CHAT, {"messages": [IMAGE]}, MultiModal()),
    ],
)
def test_every_request_shape(path: str, fields: dict[str, Any], asked: object) -> None:
    assert asked_of(path, fields) == asked


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [1, "a"]}),
        ("/v1/completions", {"prompt": [1, 1 << 40]}),
        ("/v1/completions", {"prompt": [True]}),
        ("/v1/completions", {"prompt": "a", "truncate_prompt_tokens": 5}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [1]}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {"messages": [HELLO], "chat_template": "{{ x }}"}),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}),
        ("/v1/responses", {"input": [{"type": "function_call"}]}),
        ("/v1/responses", {"input": [{**ANSWER, "status": "in_progress"}]}),
        ("/v1/responses", {"input": "a", "tools": [TOOL]}),
        (CHAT, {"messages": [HELLO], "tools": []}),
        (CHAT, {"messages": [HELLO], "tools": "x"}),
        (CHAT, {"messages": [HELLO], "chat_template_kwargs": "x"}),
        (CHAT, {"messages": [{**HELLO, "tool_calls": {}}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}),
        ("/v1/messages", {"messages": [{"role": "robot", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}),
        ("/v1/messages", {"messages": 5}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_what_is_not_understood_is_left_to_its_text(path: str, fields: dict[str, Any]) -> None:
    assert asked_of(path, fields) is None


@pytest.mark.parametrize(
    ("asked", "shapes"),
    [
        (Text("a"), {"text"}),
        (Chat([HELLO]), {"chat"}),
        (Chat([HELLO], tools=[TOOL]), {"chat", "chat_tools"}),
        (Chat([HELLO, {"role": "assistant", "content": None, "tool_calls": [{}]}]), {"chat", "chat_tools"}),
        (Chat([HELLO, {"role": "tool", "content": "ok", "tool_call_id": "1"}]), {"chat", "chat_tools"}),
        (Chat([HELLO], options={"a": 1}), {"chat", "chat_options"}),
        (Chat([{"role": "developer", "content": "a"}]), {"chat", "chat_options"}),
        (Chat([{**HELLO, "name": "Ann"}]), {"chat", "chat_options"}),
        (Chat([{"role": "user", "content": [{"type": "text", "text": "a"}]}]), {"chat", "chat_parts"}),
        (Chat([HELLO], continued=True), {"chat", "chat_continued"}),
    ],
)
def test_what_an_engine_must_have_agreed_on(asked: Text | Chat, shapes: set[str]) -> None:
    assert asked.shapes == shapes
    assert shapes <= QUESTIONS.keys()


@pytest.mark.parametrize(
    "asked",
    [
        Text("a", special=False),
        Chat([HELLO]),
        Chat([HELLO], [TOOL], {"a": 1}),
        Chat([HELLO], add_generation_prompt=False, continued=True, special=True),
    ],
)
def test_an_engine_is_asked_for_the_same(asked: Text | Chat) -> None:
    path = "/v1/completions" if isinstance(asked, Text) else CHAT
    assert asked_of(path, asked.question()) == asked


def test_a_picture_in_a_message_of_anthropic_is_more_than_text() -> None:
    picture = {"type": "image", "source": {}}
    assert asked_of("/v1/messages", {"messages": [{"role": "user", "content": [picture]}]}) == MultiModal()
