"""Who makes a prompt's ids: the client, our tokenizer where it agrees with every engine, else the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvhearth.router.body import BadBody, read_fields
from kvhearth.router.tokens import TokenIds, Tokens
from kvhearth.router.tokens.local import LocalTokenizer
from kvhearth.router.tokens.parity import QUESTIONS
from kvhearth.router.tokens.shapes import CHAT, Chat, Text, asked_of
from kvhearth.router.tokens.tokens import AT_ONCE_BYTES

from .conftest import TEMPLATE, make

E = ("e",)
"""The engine that serves the model."""

HELLO = {"messages": [{"role": "user", "content": "hello world"}]}


class Engine:
    """Answers /tokenize by a tokenizer of its own."""

    def __init__(self, folder: Path) -> None:
        self._local = LocalTokenizer(folder)
        self.questions = 0
        self.answer: tuple[int, Any] | Exception | None = None

    async def ask(self, path: str, question: dict[str, Any]) -> tuple[int, Any]:
        assert path == "/tokenize"
        self.questions += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer
        asked = asked_of(CHAT if "messages" in question else "/v1/completions", question)
        assert isinstance(asked, Text | Chat)
        return 200, {"tokens": self._local.encode(self._local.text_of(asked), special=asked.special)}


@pytest.fixture
def engine(folder: Path) -> Engine:
    return Engine(folder)


async def ids(found: TokenIds | asyncio.Future[TokenIds]) -> TokenIds:
    return found if isinstance(found, TokenIds) else await found


async def test_ids_that_are_given_are_taken_at_once(engine: Engine) -> None:
    assert Tokens(None).of("/v1/completions", {"prompt": [5, 6]}, "m", engine.ask, E) == TokenIds([5, 6])
    assert engine.questions == 0


async def test_without_a_tokenizer_the_engine_is_asked(engine: Engine, local: LocalTokenizer) -> None:
    tokens = Tokens(None)
    found = await ids(tokens.of("/v1/completions", {"prompt": "hello world"}, "m", engine.ask, E))
    assert found == TokenIds(local.encode("hello world", special=True))
    chat = await ids(tokens.of(CHAT, HELLO, "m", engine.ask, E))
    assert chat.ids == local.encode(local.text_of(Chat(HELLO["messages"])), special=False)
    assert await tokens.register("e", "m", engine.ask) is None


async def test_no_shape_is_trusted_before_an_engine_has_agreed(engine: Engine, local: LocalTokenizer) -> None:
    tokens = Tokens(local)
    await ids(tokens.of(CHAT, HELLO, "m", engine.ask, E))
    assert engine.questions == 1
    parity = await tokens.register("e", "m", engine.ask)
    assert parity is not None
    assert (parity.agreed, parity.differing) == (QUESTIONS.keys(), {})
    asked = engine.questions
    assert (await ids(tokens.of(CHAT, HELLO, "m", engine.ask, E))).ids
    assert engine.questions == asked
    tokens.close()


async def test_where_an_engine_differs_it_is_asked_and_told_why(local: LocalTokenizer, tmp_path: Path) -> None:
    other = Engine(make(tmp_path / "other", TEMPLATE.replace("{% if tools %}", "{% if false %}")))
    tokens = Tokens(local)
    parity = await tokens.register("e", "m", other.ask)
    assert parity is not None
    assert list(parity.differing) == ["chat_tools"]
    assert "ids for the engine's" in parity.differing["chat_tools"]
    asked = other.questions
    await ids(tokens.of(CHAT, HELLO, "m", other.ask, E))
    assert other.questions == asked
    await ids(tokens.of(CHAT, {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "m", other.ask, E))
    assert other.questions == asked + 1
    tokens.forget("e")
    await ids(tokens.of(CHAT, HELLO, "m", other.ask, E))
    assert other.questions == asked + 2
    tokens.close()


async def test_one_engine_of_the_model_that_differs_is_enough_to_ask(
    engine: Engine, local: LocalTokenizer, tmp_path: Path
) -> None:
    other = Engine(make(tmp_path / "other", TEMPLATE.replace("\n{{ m", " {{ m")))
    tokens = Tokens(local)
    await tokens.register("e", "m", engine.ask)
    await tokens.register("f", "m", other.ask)
    asked = engine.questions
    await ids(tokens.of(CHAT, HELLO, "m", engine.ask, ("e", "f")))
    assert engine.questions == asked + 1
    await ids(tokens.of(CHAT, HELLO, "m", engine.ask, ("e", "new")))
    assert engine.questions == asked + 2
    await ids(tokens.of(CHAT, HELLO, "m", engine.ask, ("e",)))
    assert engine.questions == asked + 2, "an engine of another model has no say"
    tokens.close()


async def test_long_prompts_are_encoded_off_the_loop(engine: Engine, local: LocalTokenizer) -> None:
    tokens = Tokens(local)
    await tokens.register("e", "m", engine.ask)
    text = "hello world " * AT_ONCE_BYTES
    found = tokens.of("/v1/completions", {"prompt": text}, "m", engine.ask, E)
    assert isinstance(found, asyncio.Future)
    assert (await found).ids == local.encode(text, special=True)
    chat = tokens.of(CHAT, {"messages": [{"role": "user", "content": text}]}, "m", engine.ask, E)
    assert isinstance(chat, asyncio.Future)
    again = tokens.of(CHAT, {"messages": [{"role": "user", "content": text}]}, "m", engine.ask, E)
    assert (await chat) == await ids(again)
    tokens.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, None), "tokenizer_missing"),
        ((400, {"error": {}}), "refused"),
        ((200, {"tokens": "x"}), "refused"),
        ((200, None), "refused"),
        (ConnectionRefusedError(), "unreachable"),
        (TimeoutError(), "late"),
    ],
)
async def test_an_engine_that_does_not_tell(engine: Engine, answer: Any, reason: str) -> None:
    engine.answer = answer
    found = await ids(Tokens(None).of("/v1/completions", {"prompt": "a"}, "m", engine.ask, E))
    assert found == TokenIds((), reason)


async def test_what_no_engine_tokenizes_has_a_reason(engine: Engine) -> None:
    tokens = Tokens(None)
    image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    assert tokens.of(CHAT, image, "m", engine.ask, E) == TokenIds((), "multi_modal")
    assert tokens.of("/v1/rerank", {"query": "q"}, "m", engine.ask, E) == TokenIds((), "shape")
    assert tokens.counts["none"] == 2


async def test_a_conversation_that_the_template_refuses(engine: Engine, tmp_path: Path) -> None:
    strict = TEMPLATE + "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}"
    tokens = Tokens(LocalTokenizer(make(tmp_path / "strict", strict)))
    await tokens.register("e", "m", engine.ask)
    long = {"messages": HELLO["messages"] * 5}
    assert await ids(tokens.of(CHAT, long, "m", engine.ask, E)) == TokenIds((), "refused")
    tokens.close()


DEEP = {
    "an argument": b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":%b}}]}]}',
    "a tool": b'{"messages":[{"role":"user","content":"a"}],"tools":[{"function":{"name":"f","parameters":%b}}]}',
    "an input": b'{"messages":[{"role":"assistant","content":[{"type":"tool_use","name":"f","input":%b}]}]}',
    "a part": b'{"messages":[{"role":"user","content":[{"type":"text","text":"a","x":%b}]}]}',
}


@pytest.mark.parametrize("place", DEEP)
async def test_a_body_nested_as_deeply_as_can_be_read_is_a_refusal_at_most(
    engine: Engine, local: LocalTokenizer, place: str
) -> None:
    async def ask(path: str, question: dict[str, Any]) -> tuple[int, Any]:
        msgspec.json.encode(question)
        return 404, None

    tokens = Tokens(local)
    await tokens.register("e", "m", engine.ask)
    readable = 0
    for depth in range(850, 1050):
        try:
            fields = read_fields(DEEP[place] % (b"[" * depth + b"]" * depth))
        except BadBody:
            continue
        readable = depth
        for path in (CHAT, "/v1/messages"):
            for engines in (E, ("another",)):
                await ids(tokens.of(path, fields, "m", ask, engines))
    assert readable
    tokens.close()
