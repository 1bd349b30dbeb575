"""What a response cost in tokens is read from its end, whichever API it is of and however its bytes were cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.usage import TAIL_BYTES, Usage, read_usage

CHAT = {"prompt_tokens": 12, "total_tokens": 19, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 7, "total_tokens": 19}
MESSAGES = {"input_tokens": 12, "output_tokens": 7, "cache_read_input_tokens": 8}
STREAM = b'data: {"choices":[{"text":"x"}]}\n\ndata: {"choices":[],"usage":%b}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("usage", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
def test_each_apis_names_are_known(usage):
    body = json.dumps({"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": None}).encode()
    assert read_usage(b"", body) == Usage(12, 7, 8)
    assert read_usage(b"", STREAM % json.dumps(usage).encode()) == Usage(12, 7, 8)


@given(st.integers(0, 1000))
def test_a_cut_anywhere_in_the_last_events_loses_nothing(cut):
    whole = STREAM % json.dumps(CHAT).encode()
    cut %= len(whole)
    assert read_usage(whole[:cut], whole[cut:]) == Usage(12, 7, 8)


def test_a_long_text_before_it_is_not_looked_at():
    body = json.dumps({"text": '"usage":{"prompt_tokens":1}' * 10_000, "usage": CHAT}).encode()
    assert read_usage(b"", body) == Usage(12, 7, 8)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"data: [DONE]\n\n",
        b'{"usage":null}',
        json.dumps({"choices": [{"text": '"usage": {"prompt_tokens": 5}'}]}).encode(),
        json.dumps({"usage": CHAT, "prompt_logprobs": [0.5] * TAIL_BYTES}).encode(),
        b'{"usage":{"prompt_tokens":"many"}}',
    ],
    ids=["empty", "stream", "null", "in a text", "too far from the end", "not numbers"],
)
def test_without_usage_there_is_none(body):
    assert read_usage(b"", body) is None


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_taken(before, last):
    read_usage(before, last)
