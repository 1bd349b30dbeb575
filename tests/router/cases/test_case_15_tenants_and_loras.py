"""Tenants (`cache_salt`) and LoRA adapters never share a hit, in the router's belief as in the engine's own cache."""

from __future__ import annotations

import json

import pytest

WHO = {
    "nobody": {"model": "m"},
    "tenant a": {"model": "m", "cache_salt": "a"},
    "tenant b": {"model": "m", "cache_salt": "b"},
    "adapter": {"model": "french"},
    "another adapter": {"model": "german"},
    "adapter of a": {"model": "french", "cache_salt": "a"},
}
ADAPTERS = (("french", "/adapters/french"), ("german", "/adapters/german"))


def ask(wire, who: str, **fields) -> tuple[int, int]:
    """Tokens that the router expected to be in HBM, and those that the engine then found in its cache."""
    wire.post(json.dumps({"max_tokens": 1, **WHO[who], **fields}).encode())
    status, lines, body = wire.response()
    assert status == 200, body
    told = dict(lines)["x-kvhearth-hit"]
    expected = int(told.split(",")[0].removeprefix("tokens=")) if told.startswith("tokens=") else 0
    return expected, json.loads(body)["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("prompt", [list(range(321)), "the quick brown fox " * 80], ids=["ids", "text"])
def test_the_same_prompt_of_others_is_no_hit_and_ones_own_is(emulate, prompt):
    emulated = emulate(1, lora_modules=ADAPTERS)
    wire = emulated.router.wire()
    for who in WHO:
        assert ask(wire, who, prompt=prompt) == (0, 0), who
        emulated.until_all_told()
    for who in WHO:
        expected, cached = ask(wire, who, prompt=prompt)
        assert expected == cached >= 320, who


def test_keys_in_the_index_are_as_many_as_there_are_tenants(emulate):
    emulated = emulate(2, lora_modules=ADAPTERS)
    wire = emulated.router.wire()
    for number, who in enumerate(WHO, start=1):
        ask(wire, who, prompt=list(range(321)))
        emulated.until_all_told()
        emulated.lab.until(lambda number=number: emulated.router.metric("kvhearth_router_index_keys") == 20 * number)


def test_a_tenants_prompt_by_text_stays_with_its_own_engine(lab, kv_nobody):
    """Engines that tell no ids: the fall-back by text keeps tenants apart as well."""
    router = lab.router(lab.engine("m", "french", "german"), policy="kv-aware", kv=kv_nobody)
    wire = router.wire()

    def pieces(who: str) -> str:
        wire.post(json.dumps({**WHO[who], "prompt": "x" * 2560}).encode())
        return dict(wire.response()[1])["x-kvhearth-hit"]

    assert {who: pieces(who) for who in WHO} == dict.fromkeys(WHO, "pieces=0/10")
    assert {who: pieces(who) for who in WHO} == dict.fromkeys(WHO, "pieces=10/10")
