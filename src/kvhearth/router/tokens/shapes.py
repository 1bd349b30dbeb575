"""What a request asks to be made into tokens: one text, or a conversation for the chat template. Knows each API's
fields, and no tokenizer. What is not understood is None: the request is routed by its text then.

As vLLM 0.32 does it (``vllm/entrypoints``): of a list of prompts the first is meant here, for it decides the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvhearth.router.tokens.anthropic import NotText, chat_of
from kvhearth.router.tokens.chat import TEXT_PARTS, Message

CHAT = "/v1/chat/completions"
_TEXTS = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/pooling": "input"}
_PLAIN = frozenset({"role", "content"})


class Text(NamedTuple):
    """Text to be encoded; ``special``: with what the tokenizer puts around a text."""

    text: str
    special: bool = True

    @property
    def shapes(self) -> frozenset[str]:
        """What an engine must have agreed on."""
        return frozenset({"text"})

    def question(self) -> dict[str, Any]:
        """For an engine's ``/tokenize``."""
        return {"prompt": self.text, "add_special_tokens": self.special}


class Chat(NamedTuple):
    """A conversation for the chat template, as chat completions have it. ``options`` are the template's further
    variables; ``continued``: the last message goes on."""

    messages: list[Message]
    tools: list[Any] | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it
    add_generation_prompt: bool = True
    continued: bool = False
    special: bool = False

    @property
    def shapes(self) -> frozenset[str]:
        """What an engine must have agreed on: every kind of question that the probe asks and that this is like."""
        shapes = {"chat"}
        for message in self.messages:
            if message["role"] == "tool" or message.get("tool_calls"):
                shapes.add("chat_tools")
            elif message["role"] == "developer" or not message.keys() <= _PLAIN:
                shapes.add("chat_options")
            if not isinstance(message.get("content"), str | None):
                shapes.add("chat_parts")
        if self.tools is not None:
            shapes.add("chat_tools")
        if self.options:
            shapes.add("chat_options")
        if self.continued:
            shapes.add("chat_continued")
        return frozenset(shapes)

    def question(self) -> dict[str, Any]:
        """For an engine's ``/tokenize``."""
        asked: dict[str, Any] = {
            "messages": self.messages,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continued,
            "add_special_tokens": self.special,
        }
        if self.tools is not None:
            asked["tools"] = self.tools
        if self.options:
            asked["chat_template_kwargs"] = self.options
        return asked


class MultiModal(NamedTuple):
    """There is more in the prompt than text, and what it becomes only the engine knows."""


Asked = Text | Chat | MultiModal | list[int] | None
"""Token ids as they are given, what makes them, or None."""


def asked_of(path: str, fields: dict[str, Any]) -> Asked:
    """What a request's body wants tokenized."""
    if fields.get("truncate_prompt_tokens") is not None or fields.get("chat_template") is not None:
        return None
    if path == CHAT:
        return _chat(fields)
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


def _chat(fields: dict[str, Any]) -> Asked:
    messages = fields.get("messages")
    tools = fields.get("tools")
    if not isinstance(messages, list) or not (tools is None or (isinstance(tools, list) and tools)):
        return None
    wrong = _what_is_no_text(messages)
    if wrong is not None:
        return wrong[0]
    options = _options(fields.get("chat_template_kwargs"), fields.get("reasoning_effort"), fields.get("documents"))
    if options is None:
        return None
    return Chat(
        messages,
        tools,
        options,
        fields.get("add_generation_prompt") is not False,
        fields.get("continue_final_message") is True,
        fields.get("add_special_tokens") is True,
    )


def _what_is_no_text(messages: Sequence[Any]) -> tuple[Asked] | None:
    """What the request is instead of a conversation of texts; None: it is one."""
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return (None,)
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | list | None) or not isinstance(calls, list | None):
            return (None,)
        for part in content if isinstance(content, list) else ():
            if isinstance(part, str):
                continue
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                return (None,)
            if part["type"] not in TEXT_PARTS:
                return (MultiModal(),)
            if not isinstance(part.get(TEXT_PARTS[part["type"]]), str | None):
                return (None,)
    return None if messages else (None,)


def _options(given: Any, effort: Any, documents: Any = None) -> dict[str, Any] | None:
    """Variables of the template: the client's own, and what other fields mean for it; None: they make no sense."""
    if not isinstance(given, dict | None):
        return None
    options = dict(given or {})
    if effort is not None:
        options.setdefault("enable_thinking", effort != "none")
        options["reasoning_effort"] = effort
    if documents is not None:
        options["documents"] = documents
    return options


def _responses(fields: dict[str, Any]) -> Asked:
    if fields.get("tools") or fields.get("previous_response_id") is not None:
        return None
    messages: list[Message] = []
    if fields.get("instructions"):
        messages.append({"role": "system", "content": fields["instructions"]})
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list) and given and all(map(_is_whole_message, given)):
        messages += map(_answered, given)
    else:
        return None
    reasoning = fields.get("reasoning")
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    return _chat(
        {"messages": messages, "chat_template_kwargs": fields.get("chat_template_kwargs"), "reasoning_effort": effort}
    )


def _is_whole_message(item: Any) -> bool:
    """Whether an item of a response's input is a message of its own, and complete."""
    return isinstance(item, dict) and "role" in item and item.get("status") not in ("in_progress", "incomplete")


def _answered(item: Message) -> Message:
    """An earlier answer is its first text; any other message is as it came, but for what only this API has."""
    if item["role"] != "assistant":
        return {name: value for name, value in item.items() if name not in ("type", "status", "id")}
    content = item.get("content")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return {"role": "assistant", "content": content}


def _anthropic(fields: dict[str, Any]) -> Asked:
    try:
        return _chat(chat_of(fields))
    except NotText as error:
        return MultiModal() if error.is_media else None
    except (TypeError, AttributeError, RecursionError):  # a body that no engine takes either
        return None
