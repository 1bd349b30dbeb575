"""Shapes whose ids only an engine's own tokenizer makes: the router asks it with all that changes the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvhearth.router.config import EventSource, KvSettings

from ..feeds.conftest import BLOCK, Publisher, stored

TEXT = "the quick brown fox " * 20
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
MESSAGES = [{"role": "user", "content": TEXT}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SHAPES = {
    "completion": ("/v1/completions", {"prompt": TEXT}),
    "completions": ("/v1/completions", {"prompt": [TEXT, "another"]}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
    "continued": (
        "/v1/chat/completions",
        {
            "messages": [*MESSAGES, {"role": "assistant", "content": "Well,"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    "responses": ("/v1/responses", {"input": TEXT, "instructions": "Be brief."}),
    "embeddings": ("/v1/embeddings", {"input": [TEXT]}),
}
NOT_TEXT = {
    "image": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, IMAGE]}]},
        "multi_modal",
    ),
    "rerank": ("/v1/rerank", {"query": TEXT, "documents": ["a", "b"]}, "shape"),
}


def ids_of(question: dict) -> list[int]:
    """As a tokenizer whose every id depends on all of the question, as a template's may: nothing may be left out."""
    return [7, *json.dumps(question, sort_keys=True).encode()]


async def behave(engine, received, reader, writer) -> None:
    if received.target == "/tokenize":
        body = json.dumps({"tokens": ids_of(json.loads(received.body))}).encode()
    else:
        body = b'{"ok":true}'
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    await writer.drain()


class Pair:
    """Engines e0 and e1 that make their own ids behind a kv-aware router; e1 tells what a test has it hold."""

    def __init__(self, lab) -> None:
        self.lab = lab
        self.publisher: Publisher = lab.engines_loop.run(self._publisher())
        source = EventSource(self.publisher.events, self.publisher.replay)
        self.engines = [lab.engine(), lab.engine()]
        for engine in self.engines:
            engine.behave = behave
        settings = KvSettings(events={"e1": source}, block_tokens=BLOCK, tokens_seconds=10)
        self.router = lab.router(*self.engines, policy="kv-aware", kv=settings)
        self.wire = self.router.wire()

    @staticmethod
    async def _publisher() -> Publisher:
        return Publisher()

    def hold(self, ids: list[int]) -> None:
        blocks = len(ids) // BLOCK
        told = stored(list(range(1, blocks + 1)), token_ids=ids[: blocks * BLOCK])
        number = self.lab.engines_loop.run(self.publisher.publish(told))

        def held() -> bool:
            if self.router.metric("kvhearth_router_index_blocks", engine="e1", tier="hbm") == blocks:
                return True
            self.lab.engines_loop.run(self.publisher.again(number))  # a subscriber may be late
            return False

        self.lab.until(held, "the blocks are known")

    def ask(self, path: str, fields: dict) -> dict[str, str]:
        """The headers of the answer."""
        self.wire.post(json.dumps({"model": "m", **fields}).encode(), target=path)
        status, lines, _ = self.wire.response()
        assert status == 200
        return dict(lines)

    def asked(self) -> list[dict]:
        """What the engines' tokenizers were asked."""
        return [json.loads(r.body) for engine in self.engines for r in engine.requests if r.target == "/tokenize"]

    def close(self) -> None:
        async def close() -> None:
            self.publisher.close()

        self.lab.engines_loop.run(close())


@pytest.fixture
def pair(lab) -> Iterator[Pair]:
    made = Pair(lab)
    yield made
    made.close()


def question_of(pair: Pair, path: str, fields: dict) -> dict:
    """What the router asks of a request: found by asking a router that knows of nothing yet."""
    router = pair.lab.router(*pair.engines, policy="kv-aware", kv=pair.router.config.kv)
    wire = router.wire()
    wire.post(json.dumps({"model": "m", **fields}).encode(), target=path)
    assert wire.response()[0] == 200
    return pair.asked()[-1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_engine_that_holds_the_ids_of_the_whole_prompt_is_asked(pair, shape):
    path, fields = SHAPES[shape]
    ids = ids_of(question_of(pair, path, fields))
    pair.hold(ids)
    told = pair.ask(path, fields)
    whole = (len(ids) - 1) // BLOCK * BLOCK  # the last token is always computed
    assert told["x-kvhearth-engine"] == "e1"
    assert told["x-kvhearth-hit"].startswith(f"tokens={whole}, hbm={whole},")
    assert pair.router.metric("kvhearth_router_misses_total") == 0


def test_tools_and_a_continued_answer_are_part_of_what_the_tokenizer_is_asked(pair):
    pair.ask(*SHAPES["tools"])
    pair.ask(*SHAPES["continued"])
    [tools] = [question for question in pair.asked() if "tools" in question]
    [continued] = [question for question in pair.asked() if question["continue_final_message"]]
    assert (tools["tools"], tools["messages"], tools["add_generation_prompt"]) == ([TOOL], MESSAGES, True)
    assert (continued["add_generation_prompt"], continued["messages"][-1]["content"]) == (False, "Well,")


@pytest.mark.parametrize("shape", NOT_TEXT)
def test_what_no_tokenizer_can_be_asked_goes_by_its_text_and_says_why(pair, shape):
    path, fields, reason = NOT_TEXT[shape]
    first = pair.ask(path, fields)["x-kvhearth-engine"]
    assert pair.ask(path, fields)["x-kvhearth-engine"] == first
    assert pair.asked() == []
    assert pair.router.metric("kvhearth_router_misses_total", reason=reason) >= 1
