"""What a request asks to be made into tokens: one text, or a conversation for the chat template. Knows each API's
fields, and no tokenizer. A shape that is not understood is None: the request is routed by its text then.

As vLLM 0.32 does it (``vllm/entrypoints``): of a list of prompts the first is meant here, for it decides the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

CHAT = "/v1/chat/completions"
_TEXTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/tokenize": "prompt", "/pooling": "input"}
_CHAT_FIELDS = ("tools", "documents", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")


class Text(NamedTuple):
    """Text to be encoded; ``special``: with what the tokenizer puts around a text."""

    text: str
    special: bool = True

    @property
    def shape(self) -> str:
        return "text"


class Chat(NamedTuple):
    """A conversation for the chat template. ``options`` are those of `_CHAT_FIELDS` that were given."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    special: bool = False

    @property
    def shape(self) -> str:
        """Which of the probe's questions it is like."""
        if self.options.get("tools"):
            return "chat_tools"
        if self.options.get("continue_final_message"):
            return "chat_continued"
        if any(not isinstance(message.get("content"), str) for message in self.messages):
            return "chat_parts"
        return "chat"


class MultiModal(NamedTuple):
    """There is more in the prompt than text, and what it becomes only the engine knows."""


Asked = Text | Chat | MultiModal | list[int] | None
"""Token ids as they are given, what makes them, or None."""


def asked_of(path: str, fields: dict[str, Any]) -> Asked:
    """What a request's body wants tokenized."""
    if fields.get("truncate_prompt_tokens") is not None or fields.get("chat_template") is not None:
        return None
    if path == CHAT:
        return _chat(fields.get("messages"), {name: fields[name] for name in _CHAT_FIELDS if name in fields}, fields)
    if path == "/v1/responses":
        return _responses(fields)
    if path == "/v1/messages":
        return _anthropic(fields)
    name = _TEXTS.get(path)
    return None if name is None else _text(fields.get(name), fields.get("add_special_tokens", True))


def _text(prompt: Any, special: Any) -> Asked:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Text(prompt, special is not False)
    if isinstance(prompt, list) and prompt and all(type(one) is int and 0 <= one < 1 << 32 for one in prompt):
        return prompt
    return None


def _chat(messages: Any, options: dict[str, Any], fields: dict[str, Any]) -> Asked:
    if not isinstance(messages, list) or not messages:
        return None
    taken = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return None
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "output_text"):
                    return MultiModal()
        elif content is not None and not isinstance(content, str):
            return None
        taken.append(_with_arguments(message))
    if fields.get("tool_choice") == "none":
        options.pop("tools", None)
    return Chat(taken, options, fields.get("add_special_tokens") is True)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates expect a call's arguments as an object; clients send them as JSON in a string."""
    calls = message.get("tool_calls")
    if message["role"] != "assistant" or not isinstance(calls, list):
        return message
    taken = []
    for call in calls:
        whole = call
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = msgspec.json.decode(function["arguments"] or "{}")
            except msgspec.DecodeError:
                arguments = function["arguments"]
            whole = {**call, "function": {**function, "arguments": arguments}}
        taken.append(whole)
    return {**message, "tool_calls": taken}


def _responses(fields: dict[str, Any]) -> Asked:
    if fields.get("tools") or fields.get("previous_response_id") is not None:
        return None
    messages: list[dict[str, Any]] = []
    if isinstance(fields.get("instructions"), str):
        messages.append({"role": "system", "content": fields["instructions"]})
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and all(isinstance(one, dict) and "role" in one for one in given):
        messages += given
    else:
        return None
    return _chat(messages, {}, {})


def _anthropic(fields: dict[str, Any]) -> Asked:
    if fields.get("tools"):
        return None
    messages: list[dict[str, Any]] = []
    system = fields.get("system")
    if isinstance(system, list):
        system = "".join(part.get("text", "") for part in system if isinstance(part, dict))
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    given = fields.get("messages")
    return _chat(messages + given, {}, {}) if isinstance(given, list) else None
