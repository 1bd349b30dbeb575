"""The router before two real engines: token ids that are the engines' own, and requests where their KV is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from kvhearth.connector.tiny_models import make_tiny_model
from kvhearth.control import LocalStack
from kvhearth.control.demo_vllm import stack_of_mode
from kvhearth.metrics import parse_exposition
from kvhearth.planner.workload import Segment
from kvhearth.router.tokens.parity import QUESTIONS
from kvhearth.stack import Router

START_SECONDS = 300.0
ASK_SECONDS = 120.0
WAIT_SECONDS = 60.0

pytestmark = pytest.mark.timeout(2 * int(START_SECONDS))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Two engines, a store and the router with policy kv-aware, as `kvhearth up` runs them."""
    folder = tmp_path_factory.mktemp("router")
    stack = stack_of_mode("shared", sys.executable, make_tiny_model("llama", folder / "model"))
    (pool,) = stack.pools
    pool = pool.model_copy(update={"offload": pool.offload.model_copy(update={"lookup_timeout_seconds": 10.0})})
    router = Router.model_validate({"listen": "127.0.0.1:0", "policy": "kv-aware"})
    with LocalStack(stack.model_copy(update={"pools": (pool,), "router": router}), folder / "logs") as up:
        assert up.wait_ready()
        yield up


class Answer:
    """What came back: who answered, the tokens that the router expected to find, and those that the engine found."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        self.engine = answer.headers["x-kvhearth-engine"]
        self.decision = answer.headers["x-kvhearth-decision"]
        parts = [part.split("=") for part in answer.headers["x-kvhearth-hit"].split(", ")]
        self.hit = {name: int(count) for name, count in parts if count.isdigit()}
        usage = answer.json()["usage"]
        self.prompt_tokens: int = usage["prompt_tokens"]
        self.cached_tokens: int = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def ask(url: str, path: str, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 2, **fields}
    return httpx.post(f"{url}{path}", json=body, timeout=ASK_SECONDS)


def complete(running: LocalStack, prompt: str) -> Answer:
    return Answer(ask(running.router_url, "/v1/completions", prompt=prompt))


def text(number: int, words: int = 150) -> str:
    return Segment(number, words).text()


def until(condition: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < give_up, what
        time.sleep(0.2)
    return found


def metric(running: LocalStack, name: str) -> dict[tuple[str, ...], float]:
    page = parse_exposition(httpx.get(f"{running.router_url}/metrics", timeout=ASK_SECONDS).text)
    return {tuple(value for _, value in sorted(labels)): value for labels, value in page.get(name, {}).items()}


def test_parity_of_token_ids_for_completions_and_for_chat_with_the_models_template(running: LocalStack) -> None:
    parity = until(
        lambda: len(found := metric(running, "kvhearth_router_token_parity")) == 2 * len(QUESTIONS) and found,
        "each engine is compared in every shape",
    )
    assert parity == {(engine, shape): 1 for engine in running.engine_urls for shape in QUESTIONS}
    before = metric(running, "kvhearth_router_tokenized_total")
    complete(running, text(90))
    messages = [{"role": "user", "content": text(91)}]
    assert ask(running.router_url, "/v1/chat/completions", messages=messages).status_code == 200
    after = metric(running, "kvhearth_router_tokenized_total")
    assert after[("local",)] == before[("local",)] + 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_repeated_prefix_goes_to_its_holder(running: LocalStack, path: str) -> None:
    for number in range(4):
        opening = text(100 + number + len(path))
        before = batches(running)
        first = send(running, path, opening)
        until(partial(has_told, running, first.engine, before), f"the events of {first.engine}")
        second = send(running, path, f"{opening} {text(200 + number)}")
        assert second.engine == first.engine
        assert second.hit["hbm"] >= first.prompt_tokens - 64
        assert second.cached_tokens >= second.hit["hbm"]


def send(running: LocalStack, path: str, prompt: str) -> Answer:
    chat = path.endswith("chat/completions")
    fields = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return Answer(ask(running.router_url, path, **fields))


def batches(running: LocalStack) -> dict[tuple[str, ...], float]:
    """Batches of KV events taken, by engine."""
    return metric(running, "kvhearth_router_feed_batches_total")


def has_told(running: LocalStack, engine: str, before: dict[tuple[str, ...], float]) -> bool:
    return batches(running)[(engine,)] > before[(engine,)]


def test_what_only_the_store_holds_is_good_for_either_engine(running: LocalStack) -> None:
    prompt = text(300)
    first = complete(running, prompt)
    chunks = (first.prompt_tokens - 1) // 64
    until(lambda: metric(running, "kvhearth_router_store_chunks").get((), 0) >= chunks, "the store's feed")
    for number in range(6):  # out of the HBM and the DRAM of its holder, where 5,000 and 6,000 tokens fit
        before = batches(running)
        other = text(310 + number, 600)
        assert ask(running.engine_urls[first.engine], "/v1/completions", prompt=other).status_code == 200
        until(partial(has_told, running, first.engine, before), f"the events of {first.engine}")
    again = complete(running, prompt)
    assert again.hit["store"] >= 64 * chunks - 64
    assert again.cached_tokens >= again.hit["store"] - 64
    page = httpx.get(f"{running.router_url}/debug/decision", params={"id": again.decision}, timeout=ASK_SECONDS).json()
    (other,) = [target for target in page["decisions"][0]["targets"] if not target["chosen"]]
    assert other["hits"]["store"] >= 64 * chunks - 64
