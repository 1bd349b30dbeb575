"""Anthropic's messages as chat completions have them: what vLLM 0.32 makes of them
(``vllm/entrypoints/anthropic/serving.py``)."""

from __future__ import annotations

from typing import Any

import msgspec

from kvhearth.router.tokens.chat import BILLING, Message


class NotText(Exception):
    """A block holds no text: an image (``is_media``), or something that is not understood."""

    def __init__(self, kind: Any) -> None:
        self.is_media = kind == "image"
        super().__init__(str(kind))


def chat_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat completion that a body of ``/v1/messages`` means, as far as its prompt goes.

    Raises:
        NotText: there is more in it than text, thinking and tools.
    """
    messages: list[Message] = []
    system = _system(fields.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in fields.get("messages") or ():
        messages += _messages(message)
    chat: dict[str, Any] = {"messages": messages, "chat_template_kwargs": fields.get("chat_template_kwargs")}
    if isinstance(tools := fields.get("tools"), list):
        chat["tools"] = list(map(_tool, tools))
    if _field(fields.get("output_config"), "effort") is not None:
        chat["reasoning_effort"] = fields["output_config"]["effort"]
    if _field(fields.get("thinking"), "type") == "disabled":
        chat["reasoning_effort"] = "none"
    return chat


def _system(system: Any) -> str:
    """Blocks are joined, but for those that name the request and not the task."""
    if isinstance(system, str):
        return system
    texts = [_field(block, "text") for block in system or () if _field(block, "type") == "text"]
    return "".join(text for text in texts if text and not text.startswith(BILLING))


def _messages(message: Any) -> list[Message]:
    """What one message becomes: itself, and before it a message for each result of a tool."""
    role, content = _field(message, "role"), _field(message, "content")
    if role not in ("user", "assistant"):
        raise NotText(role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    made: Message = {"role": role}
    texts: list[str] = []
    results: list[Message] = []
    for block in content or ():
        kind = _field(block, "type")
        if kind == "text":
            texts += [block["text"]] if block.get("text") else []
        elif kind == "thinking":
            made["reasoning"] = made.get("reasoning", "") + (block.get("thinking") or "")
        elif kind == "tool_use":
            made.setdefault("tool_calls", []).append(_call(block))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        elif kind != "redacted_thinking":
            raise NotText(kind)
    if texts:
        made["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return results if role == "user" and not texts else [*results, made]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.get("input") or {}).decode()
    function = {"name": block.get("name") or "", "arguments": arguments}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _result(block: dict[str, Any]) -> Message:
    content = block.get("content")
    if isinstance(content, list):
        for item in content:
            if _field(item, "type") != "text":
                raise NotText(_field(item, "type"))
        content = "\n".join(item.get("text", "") for item in content)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}


def _tool(tool: Any) -> dict[str, Any]:
    schema = _field(tool, "input_schema")
    if not isinstance(schema, dict):
        raise NotText("tool")
    schema = schema if "type" in schema else {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    more = {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, **more}}


def _field(block: Any, name: str) -> Any:
    return block.get(name) if isinstance(block, dict) else None
