"""What of each API's request becomes tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kvhearth.router.tokens.shapes import Chat, MultiModal, Text, asked_of

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
        ("/v1/chat/completions", {"messages": [HELLO]}, Chat([HELLO], {})),
        (
            "/v1/chat/completions",
            {"messages": [HELLO], "tools": [{"x": 1}], "tool_choice": "none", "continue_final_message": True},
            Chat([HELLO], {"continue_final_message": True}),
        ),
        ("/v1/responses", {"input": "hello"}, Chat([HELLO], {})),
        ("/v1/responses", {"input": [HELLO]}, Chat([HELLO], {})),
        (
            "/v1/messages",
            {"system": "be brief", "messages": [HELLO]},
            Chat([{"role": "system", "content": "be brief"}, HELLO], {}),
        ),
        ("/v1/chat/completions", {"messages": [IMAGE]}, MultiModal()),
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
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
        ("/v1/chat/completions", {"messages": [HELLO], "chat_template": "{{ x }}"}),
        ("/v1/responses", {"input": "a", "previous_response_id": "r"}),
        ("/v1/responses", {"input": [{"type": "function_call"}]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_what_is_not_understood_is_left_to_its_text(path: str, fields: dict[str, Any]) -> None:
    assert asked_of(path, fields) is None


def test_arguments_of_calls_are_objects_for_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked = asked_of(
        "/v1/chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    )
    assert isinstance(asked, Chat)
    assert asked.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]
