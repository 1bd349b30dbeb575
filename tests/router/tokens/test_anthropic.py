"""Anthropic's messages as chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from kvhearth.router.tokens.anthropic import NotText, chat_of

HELLO = {"role": "user", "content": "hello"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
RESULT = {
    "type": "tool_result",
    "tool_use_id": "t",
    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
}
ANSWERED = {"role": "tool", "tool_call_id": "t", "content": "a\nb"}


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([HELLO], [HELLO]),
        ([{"role": "user", "content": [text("a")]}], [{"role": "user", "content": "a"}]),
        ([{"role": "user", "content": [text("a"), text("b")]}], [{"role": "user", "content": [text("a"), text("b")]}]),
        ([{"role": "assistant", "content": [USE]}], [{"role": "assistant", "tool_calls": [CALL]}]),
        ([{"role": "user", "content": [RESULT]}], [ANSWERED]),
        ([{"role": "user", "content": [RESULT, text("go on")]}], [ANSWERED, {"role": "user", "content": "go on"}]),
        (
            [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, text("a")]}],
            [{"role": "assistant", "reasoning": "hm", "content": "a"}],
        ),
        (
            [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("y")]}],
            [{"role": "assistant", "content": "y"}],
        ),
    ],
)
def test_messages(given: list[Any], messages: list[Any]) -> None:
    assert chat_of({"messages": given})["messages"] == messages


def test_the_system_is_a_message_without_what_names_the_request() -> None:
    system = [text("x-anthropic-billing-header: cch=1"), text("a"), text("b")]
    assert chat_of({"system": system, "messages": [HELLO]})["messages"][0] == {"role": "system", "content": "ab"}


def test_tools_and_effort() -> None:
    tools = [{"name": "f", "input_schema": {"properties": {}}, "strict": True}]
    chat = chat_of({"messages": [HELLO], "tools": tools, "output_config": {"effort": "high"}})
    parameters = {"properties": {}, "type": "object"}
    function = {"name": "f", "description": None, "parameters": parameters, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["reasoning_effort"] == "high"
    assert chat_of({"messages": [HELLO], "thinking": {"type": "disabled"}})["reasoning_effort"] == "none"


@pytest.mark.parametrize(
    ("fields", "is_media"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, False),
        ({"messages": [{"role": "system", "content": "a"}]}, False),
        ({"messages": [HELLO], "tools": [{"type": "web_search", "name": "w"}]}, False),
    ],
)
def test_what_is_no_text_says_so(fields: dict[str, Any], is_media: bool) -> None:
    with pytest.raises(NotText) as caught:
        chat_of(fields)
    assert caught.value.is_media is is_media
