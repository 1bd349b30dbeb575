"""The comparison with an engine's own tokenizer: a shape is trusted only where every question had the same answer."""

from __future__ import annotations

from typing import Any

import pytest

from kvhearth.router.tokens.local import LocalTokenizer
from kvhearth.router.tokens.parity import QUESTIONS, probe
from kvhearth.router.tokens.shapes import CHAT, Chat, Text, asked_of


class Engine:
    """Makes our ids, but for questions that ``spoil`` answers otherwise."""

    def __init__(self, local: LocalTokenizer, spoil: Any) -> None:
        self._local = local
        self._spoil = spoil

    async def ask(self, path: str, question: dict[str, Any]) -> tuple[int, Any]:
        assert (path, question.pop("model")) == ("/tokenize", "m")
        asked = asked_of(CHAT if "messages" in question else "/v1/completions", question)
        assert isinstance(asked, Text | Chat)
        ids = self._local.encode(self._local.text_of(asked), special=asked.special)
        return self._spoil(asked) or (200, {"tokens": ids})


async def test_equal_tokenizers_agree_on_every_shape(local: LocalTokenizer) -> None:
    parity = await probe(local, "m", Engine(local, lambda asked: None).ask)
    assert parity == (frozenset(QUESTIONS), {})


@pytest.mark.parametrize("shape", QUESTIONS)
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((200, {"tokens": [1, 2]}), "for the engine's 2"),
        ((400, {"error": {}}), "answered 400"),
        ((200, {"tokens": None}), "answered 200"),
        ((200, []), "answered 200"),
    ],
)
async def test_one_other_answer_is_enough_not_to_trust_a_shape(
    local: LocalTokenizer, shape: str, answer: Any, why: str
) -> None:
    last = asked_of(CHAT if shape != "text" else "/v1/completions", QUESTIONS[shape][-1])
    parity = await probe(local, "m", Engine(local, lambda asked: answer if asked == last else None).ask)
    assert why in parity.differing.pop(shape)
    assert (parity.agreed, parity.differing) == (QUESTIONS.keys() - {shape}, {})


async def test_what_both_refuse_they_agree_on(local: LocalTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(asked: Text | Chat) -> str:
        raise ValueError("no tools")

    real = local.text_of
    monkeypatch.setattr(local, "text_of", lambda asked: refuse(asked) if getattr(asked, "tools", None) else real(asked))

    async def ask(path: str, question: dict[str, Any]) -> tuple[int, Any]:
        if "tools" in question:
            return 400, {"error": {"message": "no tools"}}
        return await Engine(local, lambda asked: None).ask(path, question)

    assert "chat_tools" in (await probe(local, "m", ask)).agreed

    async def ask_generous(path: str, question: dict[str, Any]) -> tuple[int, Any]:
        return (200, {"tokens": [1]}) if "tools" in question else await ask(path, question)

    assert (await probe(local, "m", ask_generous)).differing == {"chat_tools": "no tools"}
