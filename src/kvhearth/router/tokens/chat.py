"""A conversation as an engine hands it to its chat template: what vLLM 0.32 makes of the messages and tools that
clients send (``vllm/renderers/chat_utils.py``, ``hf.py``). Templates print objects as they are, so keys have an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Message = dict[str, Any]

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Parts of a message that are text, by the field that has it."""

_MADE_ANEW = frozenset(
    {"type", "text", "refusal", "thinking", "name", "data", "file", "uuid", "closed", "prompt_cache_breakpoint"}
    | {f"{kind}_{form}" for kind in ("image", "audio", "video") for form in ("url", "embeds")}
    | {"input_audio", "image_pil"}
)
"""Fields of a part that a template does not see as they were; any other reaches it."""

BILLING = "x-anthropic-billing-header"
"""How a line begins by which an agent names each of its requests."""


def conversation(messages: Sequence[Message], *, as_parts: bool, knows_developer: bool) -> list[Message]:
    """The messages that a template gets.

    Args:
        messages: as clients of chat completions send them; contents are text only.
        as_parts: the template takes contents as lists of parts, else as strings.
        knows_developer: the template names the role ``developer``, else such messages become system messages.
    """
    found = [_message(message, as_parts=as_parts) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in found):
        found = _one_system_message([_as_system(message) for message in found])
    return found


def tool_schemas(tools: Sequence[Any] | None) -> list[dict[str, Any]] | None:
    """The tools that a template gets.

    Raises:
        ValueError: one is no function with a name.
    """
    if tools is None:
        return None
    found = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a tool without a name")
        schema = {name: function.get(name) for name in ("name", "description", "parameters")}
        if function.get("strict") is not None:
            schema["strict"] = function["strict"]
        deferred = tool.get("defer_loading")
        if (inner := function.get("defer_loading", deferred)) is not None:
            schema["defer_loading"] = inner
        found.append(
            {"type": "function", "function": schema, **({} if deferred is None else {"defer_loading": deferred})}
        )
    return found


def _message(message: Message, *, as_parts: bool) -> Message:
    role, content = message["role"], message.get("content")
    parts: list[Any] = [] if content is None else [content] if isinstance(content, str) else content
    if role == "system":
        parts = _without_billing(parts)
    made: Message = {"role": role, "content": _content(parts, as_parts=as_parts)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            made["tool_calls"] = [_call(call) for call in calls]
        reasoning = message.get("reasoning", message.get("reasoning_content"))
        if reasoning is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if as_parts:
            made["content"] = "\n".join(part["text"] for part in made["content"])
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _content(parts: Sequence[Any], *, as_parts: bool) -> str | list[dict[str, Any]]:
    texts: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            texts.append({"type": "text", "text": part})
            continue
        text = part.get(TEXT_PARTS[part["type"]])
        if text is not None:
            more = {name: value for name, value in part.items() if name not in _MADE_ANEW}
            texts.append({"type": "text", "text": text, **more})
    return texts if as_parts else "\n".join(part["text"] for part in texts)


def _without_billing(parts: Sequence[Any]) -> list[Any]:
    """Without the line that would make every prompt another one."""
    kept = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: an empty one for what is none.

    Raises:
        ValueError: it is no call of a function.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ValueError("a tool call that calls no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except msgspec.DecodeError:
            arguments = {}
    ordered = {
        **_in_order(function, ("arguments", "name")),
        "arguments": arguments if isinstance(arguments, dict) else {},
    }
    return {**_in_order(call, ("id", "function", "type")), "function": ordered}


def _in_order(fields: dict[str, Any], first: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in (*first, *fields) if name in fields}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}


def _one_system_message(messages: list[Message]) -> list[Message]:
    """All system messages as one, in front, where there are several or one stands elsewhere."""
    places = [at for at, message in enumerate(messages) if message["role"] == "system"]
    if places in ([], [0]):
        return messages
    texts = []
    for at in places:
        content = messages[at]["content"]
        texts.append(content if isinstance(content, str) else "\n".join(part["text"] for part in content))
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]
