"""A setting that makes no sense is refused at start, by its name, with its value and what to write instead."""

from __future__ import annotations

import logging

import pytest

from kvhearth.connector.config import PASSWORD_VARIABLE, TierConfig, dram_admission, snapshot_listen
from kvhearth.errors import UserError

ADDRESS = "127.0.0.1:7420"
SECRET = "correct-horse-battery"


def test_an_address_is_enough() -> None:
    config = TierConfig.of({"address": "unix:/run/kv.sock"})

    assert config.address == "unix:/run/kv.sock"
    assert config.store_admission == "always"


def test_sizes_are_written_as_people_write_them() -> None:
    assert TierConfig.of({"address": ADDRESS, "max_put_bytes": "64MiB"}).max_put_bytes == 64 * 2**20
    assert TierConfig.of({"address": ADDRESS, "max_put_bytes": 4096}).max_put_bytes == 4096


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("address", "nowhere", "host:port"),
        ("address", 7420, "host:port"),
        ("address", None, "host:port"),
        ("address", "127.0.0.1:70000", "host:port"),
        ("pool", "two\nlines", "at most 200 bytes"),
        ("pool", "x" * 201, "at most 200 bytes"),
        ("pool", "池" * 67, "at most 200 bytes"),
        ("pool", 7, "at most 200 bytes"),
        ("pool", None, "at most 200 bytes"),
        ("store_admission", "sometimes", "always or second-sight"),
        ("store_admission", None, "always or second-sight"),
        ("store_admission", ["always"], "always or second-sight"),
        ("lookup_timeout_seconds", 0, "seconds"),
        ("lookup_timeout_seconds", -1, "seconds"),
        ("lookup_timeout_seconds", float("nan"), "seconds"),
        ("lookup_timeout_seconds", float("inf"), "seconds"),
        ("lookup_timeout_seconds", True, "seconds"),
        ("lookup_timeout_seconds", "50ms", "seconds"),
        ("load_timeout_seconds", 61, "seconds"),
        ("load_timeout_seconds", None, "seconds"),
        ("put_timeout_seconds", 0.0, "seconds"),
        ("put_timeout_seconds", [2], "seconds"),
        ("connections", 0, "1 to 16"),
        ("connections", 17, "1 to 16"),
        ("connections", True, "connections"),
        ("connections", 2.0, "connections"),
        ("connections", "2", "connections"),
        ("max_put_bytes", 0, "256MiB"),
        ("max_put_bytes", -1, "256MiB"),
        ("max_put_bytes", "plenty", "MiB"),
        ("max_put_bytes", "0", "256MiB"),
        ("max_put_bytes", None, "256MiB"),
        ("max_put_bytes", 1.5, "256MiB"),
        ("max_put_bytes", True, "256MiB"),
        ("max_put_bytes", [1], "256MiB"),
        ("weights", "v1\0", "at most 200 bytes"),
        ("weights", 1, "at most 200 bytes"),
        ("epoch", "x" * 201, "at most 200 bytes"),
        ("epoch", 3, "at most 200 bytes"),
    ],
)
def test_a_bad_value_is_named_with_its_field_and_the_remedy(name: str, value: object, remedy: str) -> None:
    with pytest.raises(UserError) as refused:
        TierConfig.of({"address": ADDRESS, name: value})

    assert refused.value.where.endswith(f"secondary_tiers[kvhearth].{name}")
    assert repr(value) in refused.value.what or (value == "0" and "0" in refused.value.what)
    assert remedy in refused.value.remedy


def test_a_missing_address_is_named() -> None:
    with pytest.raises(UserError, match=r"address: missing; give the store's host:port"):
        TierConfig.of({"pool": "chat"})


def test_a_misspelt_setting_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"lookup_timeout: unknown setting; known are .*lookup_timeout_seconds"):
        TierConfig.of({"address": ADDRESS, "lookup_timeout": 1})


def test_the_password_comes_from_the_environment_and_shows_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    config = TierConfig.of({"address": ADDRESS})
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("kvhearth.connector").info("%s %r", config, config)

    assert config.password == SECRET
    assert SECRET not in repr(config) + str(config) + caplog.text


def test_without_the_variable_there_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    assert TierConfig.of({"address": ADDRESS}).password is None
    monkeypatch.setenv(PASSWORD_VARIABLE, "")
    assert TierConfig.of({"address": ADDRESS}).password is None


def test_a_password_among_the_settings_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError) as refused:
        TierConfig.of({"address": ADDRESS, "password": SECRET})

    assert SECRET not in str(refused.value)


def test_dram_admission_is_eager_unless_said_otherwise() -> None:
    assert dram_admission({}) == "eager"
    assert dram_admission({"dram_admission": "lazy"}) == "lazy"


@pytest.mark.parametrize("value", ["Eager", "", None, 1, ["lazy"]])
def test_any_other_dram_admission_is_refused(value: object) -> None:
    with pytest.raises(UserError) as refused:
        dram_admission({"dram_admission": value})

    assert refused.value.where == "kv_connector_extra_config.dram_admission"
    assert repr(value) in refused.value.what
    assert refused.value.remedy == "choose eager or lazy"


def test_each_rank_serves_its_snapshot_at_a_port_of_its_own() -> None:
    ports = [snapshot_listen({"snapshot_listen": "127.0.0.1:9000"}, rank=rank) for rank in range(3)]

    assert [str(port) for port in ports] == ["127.0.0.1:9000", "127.0.0.1:9001", "127.0.0.1:9002"]
    assert str(snapshot_listen({"snapshot_listen": "127.0.0.1:0"}, rank=3)) == "127.0.0.1:0"
    assert snapshot_listen({}, rank=0) is None


@pytest.mark.parametrize("value", ["unix:/tmp/s", "9000", 9000, "127.0.0.1:65535", True, ""])
def test_a_snapshot_address_that_cannot_be_is_refused(value: object) -> None:
    with pytest.raises(UserError) as refused:
        snapshot_listen({"snapshot_listen": value}, rank=1)

    assert refused.value.where == "kv_connector_extra_config.snapshot_listen"
    assert str(value) in refused.value.what
    assert "host:port" in refused.value.remedy
