"""A field that a client may not set is gone whichever way it is written, and all else stays as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.body import BadBody
from kvhearth.router.rewrite import CLIENT_MAY_NOT_SET, rewrite

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*CLIENT_MAY_NOT_SET, "model", "prompt"]) | st.text(max_size=8)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(letter):04x}" for letter in text)


def test_a_body_without_such_fields_is_not_touched():
    body = b'{"model" : "m",  "prompt":"hello"}'
    assert rewrite(body, drop=CLIENT_MAY_NOT_SET, put={}) is body


def test_numbers_and_spaces_of_what_stays_are_kept():
    body = b'{"prompt": [1,  2.50, 1e3], "cache_salt": "mine"}'
    assert rewrite(body, drop=CLIENT_MAY_NOT_SET, put={}) == b'{"prompt":[1,  2.50, 1e3]}'


@pytest.mark.parametrize(
    "body",
    [
        '{"cache_salt": "mine", "a": 1}',
        '{"a": 1, "cache_salt": "one", "cache_salt": "two"}',
        f'{{"{escaped("cache_salt")}": "mine", "a": 1}}',
        '{"cache\\u005fsalt": "mine", "a": 1}',
        '{"kv_transfer_params": {"x": 1}, "priority": -5, "a": 1}',
    ],
)
def test_a_field_that_may_not_be_set_is_gone_however_it_is_written(body):
    assert json.loads(rewrite(body.encode(), drop=CLIENT_MAY_NOT_SET, put={})) == {"a": 1}


def test_what_is_put_in_takes_the_place_of_what_was_said():
    body = rewrite(b'{"cache_salt": "theirs", "a": 1}', drop=CLIENT_MAY_NOT_SET, put={"cache_salt": "ours"})
    assert json.loads(body) == {"a": 1, "cache_salt": "ours"}


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.booleans())
def test_nothing_else_changes(fields, put):
    more = {"cache_salt": "ours"} if put else {}
    body = rewrite(json.dumps(fields).encode(), drop=CLIENT_MAY_NOT_SET, put=more)
    assert json.loads(body) == {k: v for k, v in fields.items() if k not in CLIENT_MAY_NOT_SET} | more


@pytest.mark.parametrize("body", [b"[]", b'"cache_salt"', b'{"cache_salt"', b"\\"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(BadBody):
        rewrite(body, drop=CLIENT_MAY_NOT_SET, put={"a": 1})
