"""What a request asks for and which adapter it is for; nonsense costs a warning, not the engine."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.connector import facts
from kvhearth.connector.facts import LoraDigests, RequestFacts, Wishes, read_wishes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"kvhearth": None}, {"kvhearth": {}}])
def test_a_request_that_asks_for_nothing_gets_nothing(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_wishes(params) == Wishes()
    assert not caplog.records


def test_pin_and_promise_are_read() -> None:
    before = time.monotonic()
    wishes = read_wishes({"kvhearth": {"pin": True, "await_tokens": 2992, "await_seconds": 1.5}})
    after = time.monotonic()

    assert wishes.pin is True
    assert wishes.promise is not None
    assert wishes.promise.tokens == 2992
    assert before + 1.5 <= wishes.promise.until <= after + 1.5


@pytest.mark.parametrize("asked", [{"await_tokens": 10}, {"await_seconds": 2}, {"await_tokens": 0, "await_seconds": 2}])
def test_half_a_promise_is_none(asked: dict[str, Any]) -> None:
    assert read_wishes({"kvhearth": asked}).promise is None


@pytest.mark.parametrize(
    "asked",
    [
        "pin",
        7,
        ["pin"],
        {"pin": "yes"},
        {"pin": 1},
        {"pin": None},
        {"await_tokens": -1, "await_seconds": 1},
        {"await_tokens": "10", "await_seconds": 1},
        {"await_tokens": True, "await_seconds": 1},
        {"await_tokens": None, "await_seconds": 1},
        {"await_tokens": 10, "await_seconds": -1},
        {"await_tokens": 10, "await_seconds": 61},
        {"await_tokens": 10, "await_seconds": "1"},
        {"await_tokens": 10, "await_seconds": float("nan")},
        {"await_tokens": 10, "await_seconds": float("inf")},
        {"await_tokens": float("nan"), "await_seconds": 1},
        {"await_tokens": float("inf"), "await_seconds": 1},
    ],
)
def test_nonsense_is_ignored_with_one_warning(asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_wishes({"kvhearth": asked}) == Wishes()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "kv_transfer_params.kvhearth" in caplog.text
    assert "ignored" in caplog.text


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["pin", "await_tokens", "await_seconds", "else"]), JSON) | JSON)
def test_whatever_a_client_sends_the_engine_goes_on(asked: Any) -> None:
    sent = json.loads(json.dumps({"kvhearth": asked}))
    wishes = read_wishes(sent)

    assert isinstance(wishes.pin, bool)
    if wishes.promise is not None:
        assert wishes.promise.tokens >= 0
        assert wishes.promise.until <= time.monotonic() + 60


def test_a_large_object_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    read_wishes({"kvhearth": {"pin": "x" * 1_000_000}})
    read_wishes({"kvhearth": ["x"] * 100_000})

    assert len(caplog.text) < 10_000


def test_the_parent_of_a_chunk_is_the_one_before_it_where_the_group_needs_all() -> None:
    chains = [[b"a0", b"a1"], [b"b0", b"b1"]]
    facts = RequestFacts("r", 0, b"ns:", 0, Wishes(), chains, [16, 16], [True, False])

    assert facts.parent_of(0, 1) == b"ns:a0"
    assert facts.parent_of(0, 0) is None
    assert facts.parent_of(1, 1) is None  # a window can do without what is before it
    chains[0].append(b"a2")
    assert facts.parent_of(0, 2) == b"ns:a1"  # the chain grows as the request does
    assert facts.parent_of(0, 4) is None


def adapter(folder: Path, content: bytes = b"\1" * 5000, **more: Any) -> Any:
    """A request for an adapter kept in ``folder``."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    return request_for(folder, **more)


def request_for(path: object, number: int = 1, **more: Any) -> Any:
    """As vLLM's ``LoRARequest``."""
    return SimpleNamespace(lora_path=str(path), lora_int_id=number, load_inplace=False, **more)


def test_no_adapter_is_the_base_model() -> None:
    assert LoraDigests().of(None) == ""


def test_the_same_files_are_the_same_adapter_wherever_they_are(tmp_path: Path) -> None:
    one, two = LoraDigests().of(adapter(tmp_path / "a")), LoraDigests().of(adapter(tmp_path / "b"))

    assert one == two
    assert one


def retrain(path: Path) -> None:
    """Change a byte, at a later time."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    stamp = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(stamp + 1000, stamp + 1000))


FILES = ["adapter_model.safetensors", "adapter_config.json"]


@pytest.mark.parametrize("file", FILES)
def test_an_adapter_retrained_in_place_is_another(tmp_path: Path, file: str) -> None:
    """To an engine started since, and to one whose cache was reset."""
    digests = LoraDigests()
    before = digests.of(adapter(tmp_path / "a"))
    retrain(tmp_path / "a" / file)
    started_since = LoraDigests().of(request_for(tmp_path / "a"))
    digests.forget()

    assert started_since not in (before, None)
    assert digests.of(request_for(tmp_path / "a")) == started_since


@pytest.mark.parametrize("file", FILES)
def test_an_adapter_whose_files_change_under_an_engine_that_has_loaded_it_shares_nothing(
    tmp_path: Path, file: str
) -> None:
    """Whether the engine has the old or the new one in memory, its HBM and DRAM hold KV of both under equal hashes."""
    digests = LoraDigests()
    request = adapter(tmp_path / "a")
    assert digests.of(request)
    original = (tmp_path / "a" / file).read_bytes()
    retrain(tmp_path / "a" / file)
    assert digests.of(request) is None
    (tmp_path / "a" / file).write_bytes(original)

    assert digests.of(request) is None
    assert digests.of(request_for(tmp_path / "a", 2)) is None  # nor under another id


def test_an_adapter_replaced_by_renaming_is_noticed_even_at_equal_time_and_size(tmp_path: Path) -> None:
    digests = LoraDigests()
    request = adapter(tmp_path / "a")
    assert digests.of(request)
    path = tmp_path / "a" / "adapter_model.safetensors"
    stamp = path.stat()
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"\2" * 5000)
    os.utime(fresh, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    fresh.rename(path)

    assert digests.of(request) is None


def test_an_adapter_without_files_here_shares_nothing(tmp_path: Path) -> None:
    assert LoraDigests().of(request_for(tmp_path / "absent")) is None
    assert LoraDigests().of(request_for("someone/adapter")) is None


def test_an_adapter_that_cannot_be_read_shares_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.bin").symlink_to("adapter_model.bin")  # a loop: stat fails for root too

    assert LoraDigests().of(request) is None
    assert "adapter_model.bin" in caplog.text


def test_a_request_without_a_path_shares_nothing() -> None:
    assert LoraDigests().of(SimpleNamespace()) is None


def test_an_adapter_whose_weights_are_not_here_shares_nothing(tmp_path: Path) -> None:
    request = adapter(tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()

    assert LoraDigests().of(request) is None


def test_the_table_of_adapters_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_MOST_ADAPTERS", 3)
    digests = LoraDigests()
    found = [digests.of(adapter(tmp_path / str(number))) for number in range(5)]

    assert all(found[:3])
    assert found[3:] == [None, None]
    assert digests.of(request_for(tmp_path / "0")) == found[0]
    assert len(digests._known) == 3
