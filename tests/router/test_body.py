"""What is read from a body: model, content, load, for every shape of request."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.router.body import (
    MAX_PARTS,
    MAX_VALUES,
    NON_TEXT_PART_TOKENS,
    BadBody,
    Routable,
    read_body,
    read_fields,
    routable_of,
    session_of,
    with_model,
)

JSON = b"application/json"


def read(**fields) -> Routable:
    return read_body(json.dumps(fields).encode(), JSON)


def test_model_salt_content_and_load_are_read():
    assert read(model="m", cache_salt="s", prompt="hé" * 10) == Routable("m", ["hé".encode() * 10], "s", 7)


def test_how_the_json_is_written_does_not_matter():
    fields = {"model": "m", "messages": [{"role": "user", "content": "naïve \n text"}]}
    plain = read_body(json.dumps(fields, ensure_ascii=True, indent=2).encode(), JSON)
    dense = read_body(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(), JSON)
    assert plain == dense


def test_text_is_the_same_as_a_string_and_as_a_part():
    as_string = read(messages=[{"role": "user", "content": "hello"}])
    as_part = read(messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}])
    assert as_string == as_part


def test_token_ids_are_hashed_by_value_and_counted_exactly():
    ids = read(prompt=list(range(100, 1100)))
    assert ids.tokens == 1000
    assert ids == read(prompt=[list(range(100, 1100))])
    assert ids.content != read(prompt=[100, *range(102, 1101)]).content


def test_token_ids_that_cannot_be_are_left_for_the_engine_to_refuse():
    for ids in ([1, -5], [1, 2**40], [1, "x"], [1, None]):
        assert read(prompt=ids).content


def test_an_image_counts_by_a_constant_and_is_told_apart():
    def image(data: str) -> Routable:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return read(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])

    assert image("A" * 1_000_000).content != image("B" * 1_000_000).content
    assert NON_TEXT_PART_TOKENS <= image("A" * 1_000_000).tokens < NON_TEXT_PART_TOKENS + 20


def test_tools_come_before_messages_as_in_the_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    content = read(messages=[{"role": "user", "content": "hello"}], tools=tools).content
    assert content.startswith(b'[{"type":"function"')


def test_tool_calls_belong_to_the_content():
    def call(arguments: str) -> bytes:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return read(messages=[{"role": "assistant", "content": None, "tool_calls": calls}]).content

    assert call("{}") != call('{"a":1}')


texts = st.text(max_size=50)
messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": texts})


@settings(max_examples=50)
@given(st.lists(messages, min_size=1, max_size=5), st.lists(messages, max_size=3))
def test_a_longer_conversation_begins_with_the_content_of_the_shorter(before, more):
    assert read(messages=before + more).content.startswith(read(messages=before).content)


@settings(max_examples=50)
@given(st.lists(messages, min_size=1, max_size=4), st.lists(messages, min_size=1, max_size=4))
def test_roles_keep_conversations_apart(one, other):
    if [message["role"] for message in one] != [message["role"] for message in other]:
        plain = [[{**message, "content": "x"} for message in side] for side in (one, other)]
        assert read(messages=plain[0]).content != read(messages=plain[1]).content


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50)
@given(st.sampled_from(["prompt", "messages", "input", "tools", "documents", "tokens", "other"]), anything)
def test_any_shape_is_accepted_for_the_engine_to_judge(field, value):
    got = read(model="m", **{field: value})
    assert (got.model, got.tokens >= 1) == ("m", True)


def read_or_refuse(body: bytes, content_type: bytes) -> Routable | str:
    """What was read, or what was said; anything else escapes and fails the test."""
    try:
        return read_body(body, content_type)
    except BadBody as bad:
        return bad.message


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body):
    assert read_or_refuse(body, JSON)


@settings(max_examples=50)
@given(st.binary(max_size=300), st.text(max_size=30))
def test_any_form_is_read_or_refused(body, boundary):
    assert read_or_refuse(body, f"multipart/form-data; boundary={boundary}".encode())


def test_nesting_that_cannot_be_read_is_refused():
    def nested(depth: int) -> bytes:
        return b'{"prompt":' + b"[" * depth + b"1" + b"]" * depth + b"}"

    assert isinstance(read_or_refuse(nested(100), JSON), Routable)
    for depth in (500, 900, 1000, 100_000):  # the decoder's bound, ours, and beyond both
        assert read_or_refuse(nested(depth), JSON)
    assert "nested" in read_or_refuse(nested(100_000), JSON)


@pytest.mark.parametrize("quotes", ['"', ""])
def test_the_model_of_a_form(quotes):
    body = (
        b'--b0\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\nname="model"\r\n\r\nwrong\r\n'
        b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b0--\r\n'
    )
    got = read_body(body, f"multipart/form-data; boundary={quotes}b0{quotes}".encode())
    assert got.model == "whisper"


def test_a_form_without_model_or_boundary():
    body = b'--b0\r\nContent-Disposition: form-data; name="x"\r\n\r\nmodel\r\n--b0--\r\n'
    assert read_body(body, b"multipart/form-data; boundary=b0").model is None
    with pytest.raises(BadBody, match="boundary"):
        read_body(body, b"multipart/form-data")


def test_a_part_counts_only_where_a_line_begins_and_a_form_without_end_is_no_trouble():
    body = (
        b'--b0\r\nContent-Disposition: form-data; name="x"\r\n\r\nv--b0\r\nContent-Disposition: form-data; '
        b'name="model"\r\n\r\nwrong\r\n--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nright\r\n--b0--\r\n'
    )
    assert read_body(body, b"multipart/form-data; boundary=b0").model == "right"
    for cut in range(len(body)):
        read_body(body[:cut], b"multipart/form-data; boundary=b0")


def test_the_search_for_a_forms_model_is_bounded():
    def form(parts: int) -> bytes:
        return (
            b"--b" + b"\r\n\r\n\r\n--b" * parts + b'\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--'
        )

    assert read_body(form(MAX_PARTS - 1), b"multipart/form-data; boundary=b").model == "m"
    assert read_body(form(MAX_PARTS), b"multipart/form-data; boundary=b").model is None


@pytest.mark.parametrize("value", [b"[],", b"{},", b'"",', b"1,", b"[[[[[[[[[]]]]]]]]],"])
def test_a_body_of_more_values_than_can_be_read_in_good_time_is_refused(value):
    body = b'{"prompt":[' + value * (MAX_VALUES + 1) + b"1]}"
    assert f"more than {MAX_VALUES} values" in read_or_refuse(body, JSON)


def test_a_prompt_of_a_million_token_ids_is_read():
    assert read_or_refuse(b'{"prompt":[' + b"7," * 1_000_000 + b"7]}", JSON).tokens == 1_000_001


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "cache_salt", "user", "prompt_cache_key", "tools", "system", "messages", "prompt", "input", "x"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=6))
def test_a_body_read_whole_says_the_same_as_one_read_for_routing(fields):
    body = json.dumps(fields).encode()
    try:
        expected: Routable | str = read_body(body, JSON)
    except BadBody:
        expected = "bad"
    try:
        got: Routable | str = routable_of(read_fields(body))
    except BadBody:
        got = "bad"
    assert got == expected
    if isinstance(expected, Routable):
        assert session_of(fields) == expected.session


@given(st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=6), st.text(min_size=1, max_size=8))
def test_another_model_leaves_all_else_as_it_was(fields, model):
    body = json.dumps({**fields, "model": "old"}).encode()
    assert json.loads(with_model(body, JSON, model)) == {**fields, "model": model}


def test_anthropics_system_prompt_comes_before_its_messages():
    messages = [{"role": "user", "content": "hello"}]
    assert read(model="m", messages=messages, system="be kind").content.startswith(b"be kind")


def test_a_body_that_was_read_as_far_as_needed_may_not_be_one_that_can_be_changed():
    body = b'{"model": "a", "\xff": 1}'
    assert read_body(body, JSON).model == "a"
    with pytest.raises(BadBody, match="UTF-8"):
        with_model(body, JSON, "b")
