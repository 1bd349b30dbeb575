"""The object tier against a real S3 server behind a proxy that stalls, cuts, corrupts and closes, and on a folder."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.metrics import Registry, parse_exposition
from kvhearth.store.tiers.bucket import Bucket, S3Access, name_of
from kvhearth.store.tiers.guard import Reason, TierError
from kvhearth.store.tiers.objects import ObjectTier

from ..proxy import Mode, Proxy
from ..seaweed import BUCKET, SECRET_KEY, Seaweed
from .conftest import MIB, get, put, wait_for

StartObjects = Callable[..., ObjectTier]


@pytest.fixture
def start_objects(s3_proxy: Proxy, request: pytest.FixtureRequest) -> Iterator[StartObjects]:
    """Starts tiers on a prefix of the test's own, through the proxy, and waits until they have listed it."""
    tiers: list[ObjectTier] = []

    def start(*, wait: bool = True, **settings: Any) -> ObjectTier:
        prefix = request.node.name.replace("[", "-").replace("]", "")
        arguments = {
            "url": f"s3://{BUCKET}/{prefix}",
            "access": Seaweed.access_through(s3_proxy.port),
            "timeout_seconds": 10.0,
            "retries": 0,
            **settings,
        }
        tier = ObjectTier(**arguments)
        tiers.append(tier)
        tier.start()
        if wait:
            wait_for(lambda: tier.ready)
        return tier

    yield start
    s3_proxy.set_mode(Mode.PASS)
    for tier in tiers:
        tier.close()


@pytest.fixture
def start_folder(tmp_path: Path) -> Iterator[StartObjects]:
    """Starts tiers on ``file://`` of ``tmp_path / "objects"``."""
    tiers: list[ObjectTier] = []
    (tmp_path / "objects").mkdir()

    def start(*, wait: bool = True, **settings: Any) -> ObjectTier:
        tier = ObjectTier(f"file://{tmp_path}/objects", **settings)
        tiers.append(tier)
        tier.start()
        if wait:
            wait_for(lambda: tier.ready)
        return tier

    yield start
    for tier in tiers:
        tier.close()


def misses(tier: ObjectTier) -> dict[str, int]:
    return dict(tier.stats().misses)


def test_values_come_back_from_s3_also_to_another_node_and_after_a_restart(start_objects: StartObjects) -> None:
    tier = start_objects()
    values = {b"k\0\xff": os.urandom(3 * MIB + 5), b"x" * 512: b"long key", b"plain": b"no header"}
    assert all(put(tier, key, value) for key, value in values.items())
    assert all(get(tier, key) == value for key, value in values.items())
    other = start_objects()
    assert sorted(other.keys()) == sorted(values)
    assert all(get(other, key) == value for key, value in values.items())
    assert other.stats()[:3] == tier.stats()[:3]


def test_what_other_nodes_put_and_delete_is_learnt_from_the_next_listing(start_objects: StartObjects) -> None:
    tier, other = start_objects(relist_seconds=0.2), start_objects(relist_seconds=0.2)
    assert put(other, b"theirs", b"value")
    wait_for(lambda: get(tier, b"theirs") == b"value")
    assert tier.delete([b"theirs", b"never there"]) == 1
    assert tier.has([b"theirs"]) == [0]
    wait_for(lambda: other.has([b"theirs"]) == [0])


def test_an_object_that_another_node_deleted_is_a_miss_and_forgotten(start_objects: StartObjects) -> None:
    """Case 2 of the store: removed between lookup and load."""
    tier, other = start_objects(), start_objects()
    assert put(tier, b"k", b"value")
    other.delete([b"k"])
    wait_for(lambda: get(tier, b"k") is None)
    assert misses(tier) == {"vanished": 1}
    assert tier.has([b"k"]) == [0]
    assert not tier.is_down


@pytest.mark.parametrize("mode", [Mode.STALL, Mode.CUT, Mode.CLOSE, Mode.UNAVAILABLE], ids=lambda mode: mode.value)
def test_a_sick_s3_is_a_bounded_miss_then_skipped_and_heals(
    start_objects: StartObjects, s3_proxy: Proxy, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    """Case 2 of the store: a tier that never answers, a reply dropped, a server dead."""
    tier = start_objects(timeout_seconds=1.0)
    value = os.urandom(MIB)
    assert put(tier, b"k", value)
    buffer = bytearray(MIB)
    with caplog.at_level(logging.INFO, logger="kvhearth"):
        s3_proxy.set_mode(mode)
        for _ in range(3):
            assert not tier.read_into(b"k", [memoryview(buffer)], time.monotonic() + 0.3)
        wait_for(lambda: tier.is_down or get(tier, b"k", 0.3) is not None)
        assert set(misses(tier)) <= {"timeout", "io", "busy", "down"}
        assert tier.has([b"k"]) == [0] or mode is Mode.CUT
        s3_proxy.set_mode(Mode.PASS)
        wait_for(lambda: not tier.is_down)
    wait_for(lambda: get(tier, b"k") == value)
    assert any("is down" in record.message for record in caplog.records)
    assert not any(SECRET_KEY in record.getMessage() for record in caplog.records)


def test_a_put_into_a_sick_s3_is_refused_within_its_timeout_and_later_works(
    start_objects: StartObjects, s3_proxy: Proxy
) -> None:
    tier = start_objects(timeout_seconds=0.3)
    s3_proxy.set_mode(Mode.STALL)
    assert [put(tier, b"k%d" % n, b"value") for n in range(4)] == [False] * 4
    assert tier.writes_down
    assert sum(tier.stats().refused.values()) == 4
    s3_proxy.set_mode(Mode.PASS)
    wait_for(lambda: put(tier, b"k", b"value"))
    assert get(tier, b"k") == b"value"


def test_bytes_corrupted_on_the_way_are_a_miss_and_never_given_out(
    start_objects: StartObjects, s3_proxy: Proxy
) -> None:
    """Case 2 of the store: checksum wrong."""
    tier = start_objects()
    value = os.urandom(MIB)
    assert put(tier, b"k", value)
    s3_proxy.set_mode(Mode.CORRUPT)
    assert get(tier, b"k") is None
    assert misses(tier) == {"checksum": 1}
    s3_proxy.set_mode(Mode.PASS)
    assert put(tier, b"k", value)
    assert get(tier, b"k") == value
    assert not tier.is_down


def test_wrong_rights_and_a_bucket_that_is_not_there_take_the_tier_down_and_tell_no_secret(
    start_objects: StartObjects, s3: Seaweed, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = S3Access(f"http://127.0.0.1:{s3.port}", "us-east-1", "tests", "another-secret")
    with caplog.at_level(logging.DEBUG):
        denied = start_objects(wait=False, access=wrong)
        missing = start_objects(wait=False, url="s3://no-such-bucket/prefix")
        wait_for(lambda: denied.is_down and missing.is_down)
        assert not put(denied, b"k", b"v")
        assert not put(missing, b"k", b"v")
    text = caplog.text
    assert "is down (denied)" in text
    assert "is down (missing)" in text
    assert "another-secret" not in text


def test_credentials_and_endpoint_come_from_the_environment(
    start_objects: StartObjects, s3: Seaweed, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = s3.access
    monkeypatch.setenv("AWS_ENDPOINT_URL", access.endpoint or "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access.access_key or "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", access.secret_key or "")
    monkeypatch.setenv("AWS_REGION", access.region or "")
    tier = start_objects(access=S3Access())
    assert put(tier, b"k", b"value")
    assert get(tier, b"k") == b"value"


def test_nodes_that_share_a_bucket_keep_it_within_its_bound_by_deleting_the_oldest(start_objects: StartObjects) -> None:
    tier, other = start_objects(max_bytes=MIB, relist_seconds=0.3), start_objects(max_bytes=MIB, relist_seconds=0.3)
    for n in range(12):
        assert put(tier if n % 2 else other, b"%02d" % n, os.urandom(200_000))
        time.sleep(0.15)  # S3 tells the age in seconds; so that several pass
    wait_for(lambda: 0 < tier.stats().stored_bytes <= MIB and set(tier.keys()) == set(other.keys()))
    assert b"11" in set(tier.keys())
    assert b"00" not in set(tier.keys())
    assert tier.stats().evictions + other.stats().evictions >= 7
    assert not put(tier, b"big", bytes(MIB + 1))
    assert tier.stats().refused == {"too_large": 1}


def test_clear_deletes_what_every_node_put_but_not_what_comes_after(start_objects: StartObjects) -> None:
    tier, other = start_objects(relist_seconds=0.2), start_objects(relist_seconds=0.2)
    assert put(tier, b"mine", b"v")
    assert put(other, b"theirs", b"v")
    tier.clear()
    assert tier.has([b"mine", b"theirs"]) == [0, 0]
    assert put(tier, b"new", b"v")
    wait_for(lambda: set(other.keys()) == {b"new"})
    assert get(other, b"new") == b"v"


def test_a_folder_serves_as_an_object_store(start_folder: StartObjects, tmp_path: Path) -> None:
    tier = start_folder(relist_seconds=0.2)
    values = {b"k%d" % n: os.urandom(1000) for n in range(20)} | {b"y" * 512: b"v", b"y" * 90: b"w"}
    assert all(put(tier, key, value) for key, value in values.items())
    other = start_folder(relist_seconds=0.2)
    assert all(get(other, key) == value for key, value in values.items())
    assert other.delete([b"k0", b"absent"]) == 1
    wait_for(lambda: not (tmp_path / "objects" / name_of(b"k0")).exists())
    assert other.has([b"k0"]) == [0]
    (tmp_path / "objects" / "stranger.txt").write_text("mine")
    tier.clear()
    wait_for(lambda: list((tmp_path / "objects").rglob("*.kv")) == [])
    assert (tmp_path / "objects" / "stranger.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "checksum"),
        (lambda raw: raw[:-1], "truncated"),
        (lambda raw: raw + b"x", "truncated"),
        (lambda raw: raw[:4] + b"\7" + raw[5:], "version"),
    ],
    ids=["flip", "cut", "grown", "version"],
)
def test_a_damaged_object_is_a_miss_counted_and_deleted(
    start_folder: StartObjects, tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    tier = start_folder()
    assert put(tier, b"k", b"value")
    path = tmp_path / "objects" / name_of(b"k")
    path.write_bytes(damage(path.read_bytes()))
    assert get(tier, b"k") is None
    assert misses(tier) == {reason: 1}
    assert tier.has([b"k"]) == [0]
    if reason == "version":
        time.sleep(0.6)
        assert path.exists()
    else:
        wait_for(lambda: not path.exists())


def test_a_folder_that_is_missing_is_never_made_and_the_tier_heals_when_it_appears(
    start_folder: StartObjects, tmp_path: Path
) -> None:
    tier = start_folder()
    assert put(tier, b"k", b"value")
    shutil.move(tmp_path / "objects", tmp_path / "away")
    wait_for(lambda: not put(tier, b"new", b"value") and tier.writes_down)
    assert not (tmp_path / "objects").exists()
    shutil.move(tmp_path / "away", tmp_path / "objects")
    wait_for(lambda: put(tier, b"new", b"value"))
    wait_for(lambda: get(tier, b"k") == b"value")


def test_a_bucket_that_permits_no_deletion_is_used_on_and_says_so_once(
    start_folder: StartObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = start_folder()
    assert put(tier, b"k", b"value")

    def denied(*_: object) -> None:
        raise TierError(Reason.DENIED, sick=False)

    monkeypatch.setattr(Bucket, "delete", denied)
    with caplog.at_level(logging.INFO, logger="kvhearth"):
        for n in range(4):
            assert tier.delete([b"k%d" % n, b"k"]) == (n == 0)
            wait_for(lambda: not tier._doomed)
        tier.clear()
        wait_for(lambda: not tier._clear_due)
    assert [record.message for record in caplog.records if "not permitted" in record.message] == [
        "object tier: not permitted to delete; what is deleted here stays in the bucket"
    ]
    assert put(tier, b"new", b"value")
    assert get(tier, b"new") == b"value"


def test_what_is_known_is_bounded(start_folder: StartObjects) -> None:
    tier = start_folder(max_objects=5)
    assert all(put(tier, b"%d" % n, b"v") for n in range(9))
    assert tier.stats().items == 5
    assert get(tier, b"8") == b"v"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_bytes": -1}, "object_max_bytes"),
        ({"max_objects": 0}, "object_max_objects"),
        ({"relist_seconds": 0}, "object_relist_seconds"),
        ({"timeout_seconds": -1}, "object_timeout_seconds"),
        ({"concurrency": 0}, "object_concurrency"),
        ({"retries": -1}, "object_retries"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        ObjectTier("file:///tmp", **settings)
    assert caught.value.where == field


def test_its_figures_show_in_a_scrape(start_folder: StartObjects) -> None:
    tier = start_folder()
    assert put(tier, b"k", b"value")
    assert get(tier, b"k") == b"value"
    assert not tier.read_into(b"none", [], time.monotonic() + 1)
    registry = Registry()
    registry.collect_from(tier.metrics)
    page = parse_exposition(registry.expose().decode())
    label = (("tier", "object"),)
    assert page["kvhearth_store_tier_reads_total"][label] == 1
    assert page["kvhearth_store_tier_written_bytes_total"][label] == 5
    assert page["kvhearth_store_tier_misses_total"][(("reason", "absent"), *label)] == 1
    assert page["kvhearth_store_tier_ready"][label] == 1


def test_a_put_that_was_given_up_does_not_come_to_lie_there_later(
    start_folder: StartObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, hung, done = start_folder(timeout_seconds=0.1, relist_seconds=0.1), threading.Event(), threading.Event()
    bucket_put = Bucket.put

    def hang(bucket: Bucket, key: bytes, body: bytes) -> None:
        hung.wait(30)
        bucket_put(bucket, key, body)
        done.set()

    monkeypatch.setattr(Bucket, "put", hang)
    assert not put(tier, b"k", b"value")
    hung.set()
    assert done.wait(30)
    wait_for(lambda: not (tmp_path / "objects" / name_of(b"k")).exists())
    assert tier.has([b"k"]) == [0]


def test_what_was_to_be_deleted_is_deleted_also_when_a_put_in_its_place_fails(
    start_folder: StartObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = start_folder()
    assert put(tier, b"k", b"old")

    def fail(*_: object) -> None:
        raise TierError(Reason.IO)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "put", fail)
        patch.setattr(Bucket, "delete", fail)
        tier.delete([b"k"])
        assert not put(tier, b"k", b"new")
    wait_for(lambda: not (tmp_path / "objects" / name_of(b"k")).exists())
