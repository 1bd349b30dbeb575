"""What a chat template sees of the messages and tools that a client sent. `tests/vllm/test_token_parity.py` has vLLM
itself say what is right."""

from __future__ import annotations

from typing import Any

import pytest

from kvhearth.router.tokens.chat import conversation, tool_schemas

USER = {"role": "user", "content": "hello"}


def _strings(*messages: dict[str, Any], knows_developer: bool = False) -> list[dict[str, Any]]:
    return conversation(messages, as_parts=False, knows_developer=knows_developer)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        (["a", "b"], "a\nb"),
        ([{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}], "a\nno"),
        ([], ""),
    ],
)
def test_contents_are_text_where_the_template_wants_text(content: Any, text: str) -> None:
    assert _strings({"role": "user", "content": content}) == [{"role": "user", "content": text}]


def test_parts_keep_what_is_not_made_anew() -> None:
    part = {"type": "input_text", "text": "a", "cache_control": {"type": "ephemeral"}, "name": "x"}
    made = conversation([{"role": "user", "content": [part]}], as_parts=True, knows_developer=False)
    assert made[0]["content"] == [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("junk", {}), ("[1]", {}), ({"a": 1}, {"a": 1}), (None, {})],
)
def test_arguments_of_a_call_are_an_object(arguments: Any, seen: dict[str, Any]) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (made,) = _strings(message)
    assert made["tool_calls"] == [{"id": "1", "function": {"arguments": seen, "name": "f"}, "type": "function"}]
    assert list(made["tool_calls"][0]) == ["id", "function", "type"]
    assert call["function"]["arguments"] == arguments, "the client's message is its own"  # type: ignore[index]


@pytest.mark.parametrize("call", [1, {}, {"function": 1}, {"type": "custom", "function": {"name": "f"}}])
def test_a_call_of_no_function_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="calls no function"):
        _strings({"role": "assistant", "content": None, "tool_calls": [call]})


def test_fields_that_templates_do_not_get_are_dropped() -> None:
    assert _strings({**USER, "foo": 1, "name": "Ann"}) == [{**USER, "name": "Ann"}]
    assert _strings({"role": "assistant", "content": "a", "tool_calls": []}) == [{"role": "assistant", "content": "a"}]


def test_reasoning_has_both_its_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        (made,) = _strings({"role": "assistant", "content": "a", name: "hm"})
        assert made["reasoning"] == made["reasoning_content"] == "hm"


def test_developers_are_the_system_to_templates_that_know_none() -> None:
    talk = ({"role": "system", "content": "s"}, USER, {"role": "developer", "content": "d"})
    assert _strings(*talk) == [{"role": "system", "content": "s\n\nd"}, USER]
    assert [message["role"] for message in _strings(*talk, knows_developer=True)] == ["system", "user", "developer"]


def test_a_line_that_names_the_request_is_no_part_of_the_prompt() -> None:
    line = "x-anthropic-billing-header: cch=1"
    assert _strings({"role": "system", "content": f"{line}\nbe brief"}) == [{"role": "system", "content": "be brief"}]
    assert _strings({"role": "user", "content": line}) == [{"role": "user", "content": line}]


def test_tools_are_in_the_order_that_templates_print() -> None:
    function = {"strict": True, "parameters": {}, "x": 1, "name": "f"}
    (made,) = tool_schemas([{"function": function, "type": "function", "y": 2}]) or ()
    assert made == {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {}, "strict": True},
    }
    assert list(made["function"]) == ["name", "description", "parameters", "strict"]
    assert tool_schemas(None) is None


@pytest.mark.parametrize("tool", [1, {}, {"function": {}}, {"function": {"name": 5}}])
def test_a_tool_without_a_name_is_refused(tool: Any) -> None:
    with pytest.raises(ValueError, match="without a name"):
        tool_schemas([tool])
