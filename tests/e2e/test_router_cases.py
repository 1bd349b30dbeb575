"""What went wrong with other routers, as a client meets it, on a stack of emulated engines with policy kv-aware: cases
7 to 9, 14 and 15. The numbers are those that the tests of `tests/router` and `tests/routing` carry too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kvhearth.control import LocalStack
from kvhearth.engine.tokens import encode
from kvhearth.metrics import parse_exposition

from .conftest import MODEL, small_stack

WAIT_SECONDS = 20.0
WORDS = "the quick brown fox "
PROMPT_TOKENS = 400


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with LocalStack(small_stack("none", 4, "kv-aware"), tmp_path_factory.mktemp("stack")) as stack:
        assert stack.wait_ready()
        yield stack


@pytest.fixture
def running(stack: LocalStack) -> Iterator[LocalStack]:
    """With empty caches, and without faults that a test has made."""
    clear(stack)
    yield stack
    for url in stack.engine_urls.values():
        httpx.delete(f"{url}/emulator/faults")


class Answer:
    """Who answered, and how many tokens the router expected it to hold."""

    def __init__(self, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        told = dict(part.split("=") for part in response.headers["x-kvhearth-hit"].split(", "))
        self.engine = response.headers["x-kvhearth-engine"]
        self.hit_tokens = int(told.get("tokens", 0))
        self.hbm_tokens = int(told.get("hbm", 0))


def ask(running: LocalStack, path: str = "/v1/completions", **fields: Any) -> Answer:
    body = {"model": MODEL, "max_tokens": 2, **fields}
    return Answer(httpx.post(f"{running.router_url}{path}", json=body, timeout=WAIT_SECONDS))


def asked_for(running: LocalStack, **fields: Any) -> socket.socket:
    """A request that is sent and not waited for; it ends with its connection."""
    body = json.dumps({"model": MODEL, "max_tokens": 2, **fields}).encode()
    host, port = running.router_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), WAIT_SECONDS)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    return connection


def clear(running: LocalStack) -> None:
    """Empty every cache; as vLLM, an engine tells of it with its next step."""
    for url in running.engine_urls.values():
        httpx.post(f"{url}/reset_prefix_cache")
        httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    until(lambda: held(running) == 0, "nothing is held")


def until(found: Callable[[], Any], what: str) -> Any:
    give_up = time.monotonic() + WAIT_SECONDS
    while not (value := found()):
        assert time.monotonic() < give_up, what
        time.sleep(0.05)
    return value


def metric(running: LocalStack, name: str, **labels: str) -> float:
    page = parse_exposition(httpx.get(f"{running.router_url}/metrics").text)
    return sum(value for key, value in page.get(name, {}).items() if labels.items() <= dict(key).items())


def held(running: LocalStack, **engine: str) -> float:
    """Blocks of HBM that the router believes the engines to hold, by what they told."""
    return metric(running, "kvhearth_router_index_blocks", tier="hbm", **engine)


def text(number: int) -> str:
    """A prompt that shares nothing with another number's."""
    return f"{number} {WORDS * 100}"


SHAPES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "string": ("/v1/completions", lambda text: {"prompt": text}),
    "list of strings": ("/v1/completions", lambda text: {"prompt": [text, "another one"]}),
    "token ids": ("/v1/completions", lambda text: {"prompt": encode(text)}),
    "list of lists": ("/v1/completions", lambda text: {"prompt": [encode(text), [1, 2, 3]]}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "chat in parts": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ),
    "chat that goes on": (
        "/v1/chat/completions",
        lambda text: {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "It is"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_case_7_every_shape_is_routed_by_its_real_tokens(running: LocalStack, shape: str) -> None:
    path, fields = SHAPES[shape]
    prompt = text(list(SHAPES).index(shape))
    first = ask(running, path, **fields(prompt))
    assert first.hit_tokens == 0
    known = until(lambda: (again := ask(running, path, **fields(prompt))).hbm_tokens and again, "its blocks are known")
    assert known.engine == first.engine
    assert known.hbm_tokens >= PROMPT_TOKENS - 16


def test_case_7_equal_tokens_are_equal_whatever_shape_they_come_in(running: LocalStack) -> None:
    holder = ask(running, prompt=text(20)).engine
    until(lambda: ask(running, prompt=text(20)).hbm_tokens, "its blocks are known")
    for fields in ({"prompt": encode(text(20))}, {"prompt": [text(20)]}):
        answer = ask(running, **fields)
        assert (answer.engine, answer.hbm_tokens >= PROMPT_TOKENS - 16) == (holder, True)


def test_case_7_a_picture_is_routed_without_tokens_and_says_so(running: LocalStack) -> None:
    before = metric(running, "kvhearth_router_misses_total", reason="multi_modal")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [picture]}]}
    answer = httpx.post(f"{running.router_url}/v1/chat/completions", json=body)
    assert answer.status_code == 400, "an emulated engine takes no pictures; that is for it to say"
    assert metric(running, "kvhearth_router_misses_total", reason="multi_modal") == before + 1


def test_case_8_the_longest_match_wins_not_the_first(running: LocalStack) -> None:
    short, long = f"8 {WORDS * 40}", f"8 {WORDS * 140}"
    engines = list(running.engine_urls.values())
    for url, prompt in zip(engines[:2], (short, long), strict=True):  # past the router: it hears of it by events only
        before = held(running)
        httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
        until(lambda before=before: held(running) > before, "its events are heard")
    answer = ask(running, prompt=f"{long} and more")
    assert answer.engine == list(running.engine_urls)[1]
    assert answer.hbm_tokens >= 140 * 4 - 16


def test_case_8_a_miss_says_why(running: LocalStack) -> None:
    before = metric(running, "kvhearth_router_misses_total")
    ask(running, prompt=text(30))
    assert metric(running, "kvhearth_router_misses_total") == before + 1
    shown = httpx.get(f"{running.router_url}/debug/decision?last=1").json()["decisions"][0]
    assert shown["miss_reason"]
    assert shown["miss_reason"] in shown["text"]


def test_case_9_one_hot_prefix_is_spread_over_the_engines(running: LocalStack) -> None:
    hot, requests = f"9 {WORDS * 300}", 64
    ask(running, prompt=hot)
    until(lambda: ask(running, prompt=hot).hbm_tokens, "its blocks are known")
    for url in running.engine_urls.values():  # so that none is answered while others come
        httpx.post(f"{url}/emulator/faults", json={"hang": "requests"})
    in_flight = "kvhearth_router_requests_in_flight"
    with contextlib.ExitStack() as waiting:
        for number in range(requests):
            waiting.enter_context(asked_for(running, prompt=f"{hot} {number}"))
        until(lambda: metric(running, in_flight) == requests, "all are under way")
        by_engine = [metric(running, in_flight, engine=engine) for engine in running.engine_urls]
    assert max(by_engine) <= 1.5 * requests / len(by_engine), by_engine
    until(lambda: metric(running, in_flight) == 0, "all have left")


def test_case_14_an_engine_that_starts_again_at_sequence_0_holds_nothing_old(running: LocalStack) -> None:
    holder = ask(running, prompt=text(40)).engine
    until(lambda: ask(running, prompt=text(40)).hbm_tokens, "its blocks are known")
    blocks = held(running, engine=holder)
    httpx.post(f"{running.engine_urls[holder]}/emulator/faults", json={"restart": True})
    other = {"model": MODEL, "prompt": text(41), "max_tokens": 1}
    httpx.post(f"{running.engine_urls[holder]}/v1/completions", json=other)  # its first events, from 0 on
    until(lambda: metric(running, "kvhearth_router_feed_restarts_total") > 0, "the restart is noticed")
    until(lambda: held(running, engine=holder) == blocks, "of the two prompts it holds one")


@pytest.mark.parametrize("fault", ["drop_events", "duplicate_events", "reorder_events"])
def test_case_14_lost_doubled_and_reordered_events_heal(running: LocalStack, fault: str) -> None:
    for url in running.engine_urls.values():
        assert httpx.post(f"{url}/emulator/faults", json={fault: 0.5, "seed": 3}).status_code == 200
    prompts = [text(50 + number) for number in range(12)]
    for prompt in prompts:
        ask(running, prompt=prompt)
    for url in running.engine_urls.values():
        httpx.delete(f"{url}/emulator/faults")
    for url in running.engine_urls.values():  # a batch after the lost one tells of the hole
        httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": f"x {url}" + WORDS * 9, "max_tokens": 1})
    for prompt in prompts:
        until(lambda prompt=prompt: ask(running, prompt=prompt).hbm_tokens >= PROMPT_TOKENS - 16, "the hole is healed")


def test_case_14_a_cleared_cache_is_empty(running: LocalStack) -> None:
    ask(running, prompt=text(70))
    until(lambda: held(running) >= 20, "its blocks are known")
    clear(running)
    assert ask(running, prompt=text(70)).hbm_tokens == 0


def test_case_15_two_salts_share_no_entries(running: LocalStack) -> None:
    ask(running, prompt=text(80), cache_salt="ann")
    until(lambda: ask(running, prompt=text(80), cache_salt="ann").hbm_tokens, "her blocks are known")
    for salt in ({"cache_salt": "bob"}, {}):
        assert ask(running, prompt=text(80), **salt).hit_tokens == 0
