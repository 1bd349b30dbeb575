"""All feeds together: ranks, silence, and the page of metrics."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import zmq

from kvhearth.metrics import Registry
from kvhearth.router.feeds import engine
from kvhearth.router.feeds.feeds import EngineEvents, Feeds
from kvhearth.routing.index import KvIndex

from .conftest import Publisher, eventually, keys_of, stored


def neighbours() -> tuple[Publisher, Publisher]:
    """Two publishers at ports that follow one another."""
    for _ in range(50):
        first, second = Publisher(), Publisher()
        with contextlib.suppress(zmq.ZMQError):  # somebody has that port
            second._pub.bind(f"tcp://127.0.0.1:{first.port + 1}")
            return first, second
        first.close()
        second.close()
    raise AssertionError("no two free ports side by side")


async def test_each_rank_is_followed_at_its_own_port(index: KvIndex) -> None:
    first, second = neighbours()
    feeds = Feeds(index)
    try:
        feeds.add(["e#0", "e#1"], EngineEvents(first.events))
        rank = feeds._engines["e#1"]
        while not rank.state.batches:
            await second.publish(stored([1]))
            await asyncio.sleep(0.01)
        await eventually(lambda: index.match(keys_of(1), ["e#0", "e#1"])[1].hbm == 1)
        assert index.match(keys_of(1), ["e#0"])[0].hbm == 0
    finally:
        await feeds.stop()
        first.close()
        second.close()


async def test_who_gets_requests_and_tells_nothing_is_named(
    index: KvIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine, "SILENT_SECONDS", -1.0)
    feeds = Feeds(index)
    registry = Registry()
    registry.collect_from(feeds.metrics)
    feeds.add(["e"], EngineEvents("tcp://127.0.0.1:1"))
    try:
        feeds.check()
        assert index.silence("e") == "no_events"
        feeds.asked("e")
        feeds.check()
        feeds.check()
        assert index.silence("e") == "silent"
        assert sum("publishes no KV events" in record.message for record in caplog.records) == 1
        assert b'kvhearth_router_feed_silent{source="e"} 1.0' in registry.expose()
    finally:
        await feeds.stop()


async def test_who_told_and_tells_no_more_is_asked_whether_it_hangs_unless_it_is_known_to_be_gone(
    publisher: Publisher, index: KvIndex, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feeds = Feeds(index)
    feeds.add(["e"], EngineEvents(publisher.events, publisher.replay))
    try:
        await publisher.publish(stored([1]))
        await eventually(lambda: index.match(keys_of(1), ["e"])[0].hbm == 1)
        monkeypatch.setattr(engine, "SILENT_SECONDS", -1.0)
        feeds.asked("e")
        feeds.restarted("e")  # it is away: its silence is no news
        feeds.check()
        assert "publishes no KV events" not in caplog.text
        feeds.asked("e")
        feeds.check()
        assert "publishes no KV events any more" in caplog.text
    finally:
        await feeds.stop()


async def test_a_target_that_is_gone_for_good_is_forgotten(publisher: Publisher, index: KvIndex) -> None:
    feeds = Feeds(index)
    feeds.add(["e"], EngineEvents(publisher.events, publisher.replay))
    await publisher.publish(stored([1]))
    feeds.restarted("e")
    await eventually(lambda: index.match(keys_of(1), ["e"])[0].hbm == 1)
    await feeds.remove("e")
    assert index.size == 0
    feeds.asked("e")
    feeds.restarted("e")
    await feeds.stop()
