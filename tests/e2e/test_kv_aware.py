"""Policy kv-aware over emulated engines that publish KV events: a prompt goes where its KV is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvhearth.control import LocalStack

from .conftest import MODEL, small_stack

WAIT_SECONDS = 20.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(small_stack(policy="kv-aware"), tmp_path) as stack:
        assert stack.wait_ready()
        yield stack


def ask(running: LocalStack, prompt: str) -> tuple[str, dict[str, int]]:
    """Who answered, and the tokens that the router expected not to be computed, by where they lie."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200
    told = answer.headers["x-kvhearth-hit"]
    hit = dict(part.split("=") for part in told.split(", "))
    return answer.headers["x-kvhearth-engine"], {name: int(count) for name, count in hit.items() if count.isdigit()}


def until_known(running: LocalStack, prompt: str, tier: str) -> tuple[str, int]:
    """Ask again until the router expects tokens from a tier; who answers then, and how many."""
    give_up = time.monotonic() + WAIT_SECONDS
    while True:
        engine, hit = ask(running, prompt)
        if hit.get(tier):
            return engine, hit[tier]
        assert time.monotonic() < give_up, hit
        time.sleep(0.1)


def test_a_repeated_prompt_goes_to_its_holder(running: LocalStack) -> None:
    prompts = [f"{number} " + "the quick brown fox " * 100 for number in range(4)]
    holders = [ask(running, prompt)[0] for prompt in prompts]
    assert len(set(holders)) == 2, "prompts that share nothing spread"
    for prompt, holder in zip(prompts, holders, strict=True):
        engine, tokens = until_known(running, prompt, "hbm")
        assert engine == holder
        assert tokens >= 300
    page = httpx.get(f"{running.router_url}/debug/decision?last=1").json()
    assert "in HBM" in page["decisions"][0]["text"]


def test_what_only_the_store_holds_is_good_for_any_engine(running: LocalStack) -> None:
    prompt = "0 " + "the quick brown fox " * 100
    ask(running, prompt)
    until_known(running, prompt, "hbm")
    for url in running.engine_urls.values():
        assert httpx.post(f"{url}/emulator/faults", json={"restart": True}).status_code == 200
    others = [f"{number} and something else " * 40 for number in range(10, 18)]
    assert len({ask(running, other)[0] for other in others}) == 2, "both have told by now that they start again"
    engine, tokens = until_known(running, prompt, "store")
    assert engine in running.engine_urls
    assert tokens >= 300
