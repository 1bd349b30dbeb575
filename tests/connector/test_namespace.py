"""Engines share exactly when every fact of their KV is equal; keys are the same in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.connector.namespace import Namespace, group_number

FIELDS = {"weights": "a1b2", "epoch": "1", "dtype": "torch.bfloat16", "rope": '{"rope_theta":10000}', "hash": "sha256"}
WORDS = st.text(max_size=12)
FACTS = st.dictionaries(st.text(min_size=1, max_size=8), WORDS, min_size=1, max_size=8)


def key_in_another_process(seed: str) -> tuple[str, int]:
    """The key prefix and a group number, as computed by an interpreter of its own."""
    code = (
        "import json,sys; from kvhearth.connector.namespace import Namespace, group_number;"
        "fields = {name: value for name, value in reversed(json.loads(sys.argv[1]).items())};"
        "print(json.dumps([Namespace(fields).key_prefix('lora').decode(), group_number('tenant')]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(FIELDS)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    prefix, group = json.loads(done.stdout)
    return prefix, group


@pytest.mark.parametrize("seed", ["0", "random", "4294967295"])
def test_keys_are_equal_across_processes_whatever_their_hash_seed(seed: str) -> None:
    assert key_in_another_process(seed) == (Namespace(FIELDS).key_prefix("lora").decode(), group_number("tenant"))


def test_a_key_begins_with_32_hex_digits_and_a_colon() -> None:
    prefix = Namespace(FIELDS).key_prefix()

    assert len(prefix) == 33
    assert prefix.endswith(b":")
    assert int(prefix[:32], 16) >= 0


@pytest.mark.parametrize("name", FIELDS)
def test_engines_that_differ_in_one_fact_share_nothing(name: str) -> None:
    ours, theirs = Namespace(FIELDS), Namespace({**FIELDS, name: FIELDS[name] + "x"})

    assert ours.digest() != theirs.digest()
    assert ours.key_prefix() != theirs.key_prefix()
    assert ours.differences(theirs) == [name]


@settings(max_examples=40, deadline=None)
@given(FACTS, FACTS)
def test_the_digest_is_equal_exactly_when_the_facts_are(a: dict[str, str], b: dict[str, str]) -> None:
    assert (Namespace(a).digest() == Namespace(b).digest()) == (a == b)
    assert Namespace(dict(reversed(a.items()))).digest() == Namespace(a).digest()


@settings(max_examples=40, deadline=None)
@given(FACTS, FACTS)
def test_differences_are_the_names_that_one_has_otherwise_or_not_at_all(a: dict[str, str], b: dict[str, str]) -> None:
    expected = sorted(name for name in {*a, *b} if a.get(name) != b.get(name))

    assert Namespace(a).differences(Namespace(b)) == expected
    assert Namespace(b).differences(Namespace(a)) == expected


def test_an_adapter_has_keys_of_its_own() -> None:
    namespace = Namespace(FIELDS)
    prefixes = {namespace.key_prefix(lora) for lora in ("", "one", "two")}

    assert len(prefixes) == 3
    assert namespace.key_prefix() == namespace.key_prefix("")


def test_an_adapter_cannot_pose_as_a_fact() -> None:
    assert Namespace({"a": "b"}).digest("c") != Namespace({"a": "b", "c": ""}).digest()
    assert Namespace({"a": 'b"],"'}).digest() != Namespace({"a": "b"}).digest('"],"')


def test_other_weights_are_another_namespace() -> None:
    ours = Namespace(FIELDS)
    theirs = ours.with_epoch("2")

    assert ours.differences(theirs) == ["epoch"]
    assert ours.key_prefix() != theirs.key_prefix()
    assert ours.epoch_number != theirs.epoch_number
    assert 0 <= theirs.epoch_number < 2**64
    assert ours.fields["epoch"] == "1"


@settings(max_examples=40, deadline=None)
@given(FACTS)
def test_what_the_register_holds_reads_back_as_it_was(fields: dict[str, str]) -> None:
    assert Namespace.from_json(Namespace(fields).to_json()) == Namespace(fields)


@pytest.mark.parametrize("text", ["", "[]", "7", "null", '{"a": 1}', '{"a": {}}', '{"a": null}', '"{}"', "{"])
def test_a_record_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Namespace.from_json(text)


@settings(max_examples=40, deadline=None)
@given(st.text(min_size=1, max_size=40))
def test_a_salt_has_a_group_and_cannot_be_read_from_it(salt: str) -> None:
    assert 0 < group_number(salt) < 2**32
    assert group_number(salt) == group_number(salt)
    if salt.isdigit() is False:
        assert salt not in str(group_number(salt))


def test_tenants_with_salts_are_apart_and_without_are_together() -> None:
    numbers = {group_number(f"tenant-{number}") for number in range(1000)}

    assert len(numbers) == 1000
    assert group_number(None) == group_number("") == 0
