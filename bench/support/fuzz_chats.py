"""The fuzz of conversations: messages with right and wrong things in them, on their way through chat templates."""

from __future__ import annotations

import random
from typing import Any

from kvhearth.router.tokens.chat import conversation, tool_schemas
from kvhearth.router.tokens.shapes import Chat, asked_of
from kvhearth.router.tokens.template import Template
from support.fuzzing import odd_value

TEMPLATES = tuple(
    Template(source, {"bos_token": "<s>"})
    for source in (
        "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}",
        "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] + m['role'] }}{% endfor %}{% endfor %}",
        "{{ bos_token + 'x' }}{% for m in messages %}{{ m.content | trim }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}"
        "{% for k, v in c.function.arguments | items %}{{ k }}{{ v | length }}{% endfor %}{% endfor %}"
        "{{ m.reasoning_content.split('x')[0] if m.reasoning_content is defined }}{% endfor %}",
    )
)


def chats(rng: random.Random) -> None:
    """A conversation with anything in it, through the chat template: a prompt, or a refusal."""
    fields: dict[str, Any] = {"messages": [_message(rng) for _ in range(rng.randint(1, 4))]}
    if rng.random() < 0.3:
        fields["tools"] = [
            {"function": {"name": "f", "parameters": odd_value(rng)}},
            *([odd_value(rng)] * (rng.random() < 0.3)),
        ]
    for name in ("chat_template_kwargs", "reasoning_effort", "continue_final_message", "documents"):
        if rng.random() < 0.1:
            fields[name] = odd_value(rng, 3)
    asked = asked_of(rng.choice(("/v1/chat/completions", "/v1/messages")), fields)
    if not isinstance(asked, Chat):
        return
    template = rng.choice(TEMPLATES)
    try:
        messages = conversation(asked.messages, as_parts=template.takes_parts, knows_developer=rng.random() < 0.5)
        text = template.render(
            messages,
            tool_schemas(asked.tools),
            asked.options,
            add_generation_prompt=asked.add_generation_prompt and not asked.continued,
            continued=asked.continued,
        )
    except ValueError:
        return
    assert isinstance(text, str)


def _message(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"role": rng.choice(("user", "assistant", "system", "tool", "developer", "x"))}
    made["content"] = rng.choice(("", "hi", None, "x-anthropic-billing-header: 1\nrest", odd_value(rng, 3)))
    if rng.random() < 0.5:
        kinds = ("text", "refusal", "thinking", "input_text", "tool_use", "tool_result")
        made["content"] = [_part(rng, rng.choice(kinds)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.3:
        function = {"name": odd_value(rng, 3), "arguments": rng.choice(("{}", "", "[1]", '{"a":1}', odd_value(rng, 2)))}
        made["tool_calls"] = [rng.choice(({"id": "1", "function": function}, odd_value(rng, 3)))]
    for name in rng.sample(
        ("reasoning", "reasoning_content", "name", "task", "tools", "tool_call_id"), rng.randrange(3)
    ):
        made[name] = odd_value(rng, 3)
    return made


def _part(rng: random.Random, kind: str) -> Any:
    if rng.random() < 0.1:
        return rng.choice(("a string", odd_value(rng, 3)))
    text = rng.choice(("a", "", None, "x-anthropic-billing-header", odd_value(rng, 3)))
    return {
        "type": kind,
        "refusal" if kind == "refusal" else "text": text,
        rng.choice(("input", "content", "x")): odd_value(rng, 3),
    }
