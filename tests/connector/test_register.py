"""Engines of a pool that cannot share are told in which facts they differ; those that never meant to are refused."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhearth.connector import register
from kvhearth.connector.namespace import Namespace
from kvhearth.connector.register import PoolRegister
from kvhearth.errors import UserError
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.server import StoreServer

FIELDS = {"weights": "w1", "dtype": "bf16", "hash": "sha256_cbor", "hash_seed": "default", "epoch": ""}
OURS = Namespace(FIELDS)
KEY = b"kvhearth:pool:chat"

Hook = Callable[[bytes, list[bytes]], bytes | None]
Engine = Callable[..., PoolRegister]


@pytest.fixture
def engine(client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Registers of engines that differ from `OURS` in what is given."""
    monkeypatch.setattr(register, "_CALL_SECONDS", 10.0)  # the machine may have other things to do
    made: list[PoolRegister] = []

    def start(pool: str = "chat", client: StoreClient = client, **changed: str) -> PoolRegister:
        made.append(PoolRegister(client, pool, Namespace({**FIELDS, **changed})))
        return made[-1]

    yield start
    for each in made:
        each.close()


def record(client: StoreClient, key: bytes = KEY) -> dict[str, Any]:
    """What the store has."""
    buffer = bytearray(1 << 16)
    result = client.get_into(key, buffer)
    assert result.hit
    found: dict[str, Any] = json.loads(buffer[: result.nbytes])
    return found


def write(client: StoreClient, value: Any, key: bytes = KEY) -> None:
    """Put a record as another engine would have."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    assert client.put(key, Header(), data).stored


def test_the_first_engine_of_a_pool_says_what_it_is(engine: Engine, client: StoreClient) -> None:
    engine().check_at_start()

    assert record(client)["fields"] == FIELDS
    assert record(client, f"kvhearth:namespace:{OURS.digest()}".encode())["fields"] == FIELDS


def test_an_engine_alike_is_told_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        register = engine()
        register.check_at_start()
        assert register.differing == []
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_an_engine_that_differs_is_told_the_fields_and_both_values(
    engine: Engine, client: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    engine().check_at_start()
    other = engine(dtype="fp8", weights="w2")
    other.check_at_start()

    assert other.differing == ["dtype", "weights"]
    assert record(client)["fields"] == FIELDS
    for part in ("chat", "dtype ('fp8' here, 'bf16' there)", "weights ('w2' here, 'w1' there)"):
        assert part in caplog.text


@pytest.mark.parametrize("name", ["hash", "hash_seed"])
def test_another_hash_is_refused_at_start_with_both_values_and_the_remedy(engine: Engine, name: str) -> None:
    engine().check_at_start()
    with pytest.raises(UserError) as refused:
        engine(**{name: "other"}).check_at_start()

    assert refused.value.where == "pool chat"
    assert f"{name} is 'other' here and '{FIELDS[name]}' in the other engines" in refused.value.what
    assert "--prefix-caching-hash-algo" in refused.value.remedy
    assert "PYTHONHASHSEED" in refused.value.remedy


def test_engines_of_different_pools_do_not_meet(engine: Engine) -> None:
    engine("chat").check_at_start()
    other = engine("code", hash="xxhash_cbor")
    other.check_at_start()

    assert other.differing == []


def test_without_a_pool_nothing_is_asked_or_written(engine: Engine, store: StoreServer, client: StoreClient) -> None:
    register = engine("")
    register.check_at_start()
    register.start()
    register.close()

    assert client.counts == {}


def test_a_record_of_an_engine_long_gone_counts_for_nothing(engine: Engine, client: StoreClient) -> None:
    write(client, {"fields": {**FIELDS, "hash": "other"}, "seen_at": time.time() - register.STALE_SECONDS - 1})
    ours = engine()
    ours.check_at_start()

    assert ours.differing == []
    assert record(client)["fields"] == FIELDS


def test_a_record_just_short_of_stale_still_counts(engine: Engine, client: StoreClient) -> None:
    write(client, {"fields": {**FIELDS, "dtype": "fp8"}, "seen_at": time.time() - register.STALE_SECONDS + 20})
    ours = engine()
    ours.check_at_start()

    assert ours.differing == ["dtype"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"7",
        b"{}",
        b'{"fields": {}}',
        b'{"fields": [], "seen_at": 1}',
        b'{"fields": {"hash": 7}, "seen_at": 9e9}',
        b'{"fields": {"hash": "other"}, "seen_at": null}',
        b'{"fields": {"hash": "other"}, "seen_at": "now"}',
        b'{"fields": {"hash": "other"}, "seen_at": NaN}',
        b'{"fields": {"hash": "other"}, "seen_at": Infinity}',
        b'{"fields": null, "seen_at": 1}',
        b"[" * 60_000,
        b"x" * 70_000,
    ],
    ids=lambda content: str(content[:40]),
)
def test_a_record_that_is_none_is_replaced(engine: Engine, client: StoreClient, content: bytes) -> None:
    write(client, content)
    ours = engine()
    ours.check_at_start()

    assert ours.differing == []
    assert record(client)["fields"] == FIELDS


def test_a_store_that_is_not_there_is_no_error(engine: Engine) -> None:
    absent = StoreClient("127.0.0.1:1", timeout_seconds=1)
    ours = engine(client=absent)
    ours.check_at_start()
    ours.start()
    ours.close()

    assert ours.differing == []
    absent.close()


def test_a_store_that_takes_calls_and_never_answers_is_no_error(
    engine: Engine, scripted: Callable[..., Any], silent: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register, "_CALL_SECONDS", 0.2)
    store = scripted(silent)
    asking = StoreClient(store.address, timeout_seconds=1)
    ours = engine(client=asking)
    ours.check_at_start()

    assert ours.differing == []
    asking.close()


def test_a_pools_name_may_be_as_long_as_the_settings_allow(engine: Engine, client: StoreClient) -> None:
    pool = "池" * 66
    engine(pool).check_at_start()

    assert record(client, f"kvhearth:pool:{pool}".encode())["fields"] == FIELDS


def test_a_living_engine_keeps_its_record_fresh(
    engine: Engine, client: StoreClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(register, "REFRESH_SECONDS", 0.02)
    ours = engine()
    ours.check_at_start()
    first = record(client)["seen_at"]
    ours.start()

    eventually(lambda: record(client)["seen_at"] > first)


def test_an_engine_is_told_when_the_others_change_and_when_they_are_alike_again(
    engine: Engine, client: StoreClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(register, "REFRESH_SECONDS", 0.02)
    ours = engine()
    ours.start()
    eventually(lambda: client.exists(KEY))
    for _ in range(100):  # ours may write its record between, once
        write(client, {"fields": {**FIELDS, "dtype": "fp8"}, "seen_at": time.time()})
        if ours.differing:
            break
        time.sleep(0.02)
    assert ours.differing == ["dtype"]
    client.delete(KEY)

    eventually(lambda: ours.differing == [] and client.exists(KEY))
    assert record(client)["fields"] == FIELDS


def test_of_two_engines_alike_one_that_gets_other_weights_is_told_or_tells_the_other(
    engine: Engine, client: StoreClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(register, "REFRESH_SECONDS", 0.02)
    ours, theirs = engine(), engine()
    for each in (ours, theirs):
        each.start()
    eventually(lambda: client.exists(KEY))
    ours.change(OURS.with_epoch("2"))

    eventually(lambda: ours.differing == ["epoch"] or theirs.differing == ["epoch"])


def test_an_engine_that_was_reset_keeps_what_it_is_now_to_itself(
    engine: Engine, client: StoreClient, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(register, "REFRESH_SECONDS", 0.02)
    ours = engine()
    ours.start()
    eventually(lambda: client.exists(KEY))
    ours.change(OURS.with_epoch("2"))
    eventually(lambda: client.exists(f"kvhearth:namespace:{OURS.with_epoch('2').digest()}".encode()), 10)
    time.sleep(0.1)

    assert ours.differing == []  # its own record is none to differ from
    assert record(client)["fields"] == dict(OURS.fields)  # the pool's is what the others have


def test_close_ends_the_thread(engine: Engine, client: StoreClient) -> None:
    ours = engine()
    ours.start()
    thread = ours._thread
    assert thread is not None
    assert thread.is_alive()
    ours.close()

    assert not thread.is_alive()
