"""Whether our tokenizer makes the ids that an engine makes: asked of the engine's ``/tokenize``, a shape at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvhearth.router.tokens.ids import AskEngine
from kvhearth.router.tokens.local import LocalTokenizer
from kvhearth.router.tokens.shapes import CHAT, Chat, Text, asked_of

_TEXT = "The quick brown fox,\n\t jumps over 13 lazy dogs — naïve café 東京 🦊 </s> <|im_end|>  end "
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    },
    {"function": {"name": "time"}, "type": "function"},
]
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call1", "type": "function", "function": {"name": "weather", "arguments": '{"place":"東京"}'}}
    ],
}
_RESULT = {"role": "tool", "tool_call_id": "call1", "content": "cloudy"}
_TALK = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Hello, who are you? "},
    {"role": "assistant", "content": "Nobody."},
]
_QUESTION = {"role": "user", "content": _TEXT}
_PARTS = [
    {"type": "text", "text": "First part.", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "Second part."},
]
_CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}

QUESTIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"prompt": _TEXT}, {"prompt": "a"}, {"prompt": _TEXT, "add_special_tokens": False}],
    "chat": [{"messages": [*_TALK, _QUESTION]}, {"messages": [_QUESTION]}],
    "chat_parts": [
        {"messages": [*_TALK, {"role": "user", "content": _PARTS}]},
        {"messages": [{"role": "system", "content": _PARTS}, _QUESTION]},
    ],
    "chat_tools": [
        {"messages": [*_TALK, _QUESTION], "tools": _TOOLS},
        {"messages": [_QUESTION, _CALL, _RESULT], "tools": _TOOLS},
    ],
    "chat_options": [
        {"messages": [_QUESTION], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [_QUESTION], "reasoning_effort": "low"},
        {"messages": [{"role": "developer", "content": "Be brief."}, _QUESTION]},
        {"messages": [*_TALK[:2], {**_TALK[2], "reasoning": "Who am I?"}, _QUESTION]},
    ],
    "chat_continued": [
        {"messages": _TALK, **_CONTINUED},
        {"messages": [*_TALK[:2], {"role": "assistant", "content": "I am  "}], **_CONTINUED},
    ],
}
"""What is asked, by shape: what `Text.shapes` and `Chat.shapes` name."""


class Parity(NamedTuple):
    """Shapes of which our ids are the engine's; of the others, why they are not used."""

    agreed: frozenset[str]
    differing: dict[str, str]


async def probe(local: LocalTokenizer, model: str, ask: AskEngine) -> Parity:
    """Compare with one engine. Raises what ``ask`` raises."""
    differing: dict[str, str] = {}
    for shape, questions in QUESTIONS.items():
        for question in questions:
            why = await _difference(local, model, question, ask)
            if why:
                differing[shape] = why
                break
    return Parity(frozenset(QUESTIONS) - differing.keys(), differing)


async def _difference(local: LocalTokenizer, model: str, question: dict[str, Any], ask: AskEngine) -> str:
    asked = asked_of(CHAT if "messages" in question else "/v1/completions", question)
    if not isinstance(asked, Text | Chat):
        return "not understood"
    try:
        ours: list[int] | None = local.encode(local.text_of(asked), special=asked.special)
    except ValueError as error:
        ours, refusal = None, str(error)
    status, answer = await ask("/tokenize", {"model": model, **asked.question()})
    theirs = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
    if ours is None:
        return "" if theirs is None else refusal
    if theirs is None:
        return f"the engine answered {status}"
    if ours == theirs:
        return ""
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"{len(ours)} ids for the engine's {len(theirs)}, different from the {at}th on"
