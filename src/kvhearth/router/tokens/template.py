"""A model's chat template, rendered as Hugging Face's tokenizers render it
(``transformers/utils/chat_template_utils.py``). Templates come with models, so they run in a sandbox.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvhearth.router.tokens.chat import Message

_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of a message that goes on; Hugging Face's own, for a template may cut at certain words."""


class Template:
    """One chat template.

    Args:
        source: in jinja2.
        special: special tokens by name, as ``bos_token``.

    Raises:
        jinja2.TemplateError: it cannot be read.
    """

    def __init__(self, source: str, special: dict[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        self._template = environment.from_string(source)
        self._special = special
        self.takes_parts = any(_is_content(loop.iter) for loop in _loops(environment.parse(source)))
        """Whether it goes through the parts of a message, so that contents are lists to it."""
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        add_generation_prompt: bool,
        continued: bool,
    ) -> str:
        """The prompt's text.

        Args:
            messages: as `chat.conversation` makes them.
            tools: as `chat.tool_schemas` makes them.
            options: further variables of the template.
            continued: the last message goes on, so nothing follows it.

        Raises:
            ValueError: the template refuses the conversation.
        """
        if continued:
            messages = [*messages[:-1], _marked(messages[-1])]
        given = {
            "documents": None,
            **self._special,
            **options,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text: str = self._template.render(given)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None
        return _cut_at_mark(text) if continued else text


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant says, for training; here it is what it holds."""

    tags = {"generation"}  # noqa: RUF012 - so jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _loops(template: nodes.Template) -> Iterator[nodes.For]:
    return template.find_all(nodes.For)


def _is_content(node: nodes.Node) -> bool:
    """Whether a loop goes over a message's content, sliced or filtered perhaps."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


def _marked(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUED}
    if not content:
        raise ValueError("the last message has no text to go on from")
    return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUED}]}


def _cut_at_mark(text: str) -> str:
    """A template that trims messages trims the mark's own space: then what stands before it was trimmed no less."""
    mark = _CONTINUED.strip()
    at = text.rfind(mark)
    if at < 0:
        raise ValueError("the chat template drops the end of the last message")
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()
