"""Following one engine's KV events over real sockets: whatever is lost, what the index believes comes true again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from kvhearth.router.feeds import engine
from kvhearth.router.feeds.engine import SILENT_SECONDS, EngineFeed
from kvhearth.routing.index import KvIndex

from .conftest import BLOCK, Publisher, eventually, keys_of, removed, stored

Follow = Callable[..., EngineFeed]


@pytest.fixture
async def follow(index: KvIndex) -> AsyncIterator[Callable[..., EngineFeed]]:
    feeds: list[EngineFeed] = []

    def start(publisher: Publisher, *, replay: bool = True, **more: object) -> EngineFeed:
        url = publisher.replay if replay else ""
        feed = EngineFeed("e", publisher.events, index, replay=url, **more)  # type: ignore[arg-type]
        feeds.append(feed)
        feed.start()
        return feed

    yield start
    for feed in feeds:
        await feed.stop()


def held(index: KvIndex, blocks: int = 8) -> int:
    return index.match(keys_of(blocks), ["e"])[0].hbm


async def heard(publisher: Publisher, feed: EngineFeed) -> None:
    """The feed's subscription has arrived: it has taken a batch that does not matter."""
    before = feed.state.batches + feed.state.duplicates
    deadline = time.monotonic() + 10
    while feed.state.batches + feed.state.duplicates == before:
        assert time.monotonic() < deadline
        await publisher.publish(removed([999]))
        await asyncio.sleep(0.02)


async def test_what_is_stored_and_removed_is_told(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    await publisher.publish(stored([1, 2, 3]))
    await eventually(lambda: held(index) == 3)
    await publisher.publish(removed([3]))
    await eventually(lambda: held(index) == 2)
    assert 0 <= feed.state.lag_seconds < 10


async def test_what_was_stored_before_we_came_is_replayed(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    await publisher.publish(stored([1, 2]))
    await publisher.publish(stored([3], 2, first=8))
    follow(publisher)
    await eventually(lambda: held(index) == 3)


async def test_case_14_lost_events_heal_by_replay(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    await publisher.publish(stored([1, 2]), send=False)
    await publisher.publish(stored([3], 2, first=8))
    await eventually(lambda: held(index) == 3)
    await eventually(lambda: feed.state.healed == {"replay": 1})


async def test_case_14_reordered_events_cost_no_replay(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    replays = publisher.replays
    first = await publisher.publish(stored([1, 2]), send=False)
    await publisher.publish(stored([3], 2, first=8))
    await publisher.again(first)
    await eventually(lambda: held(index) == 3)
    assert publisher.replays == replays
    assert not feed.state.healed


async def test_case_14_duplicated_events_do_no_harm(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    first = await publisher.publish(stored([1, 2]))
    await publisher.publish(removed([1, 2]))
    await publisher.again(first)
    await eventually(lambda: feed.state.duplicates >= 1)
    assert held(index) == 0
    assert feed.state.restarts == 0


async def test_lost_events_without_replay_are_forgotten_and_learnt_anew(
    publisher: Publisher, index: KvIndex, follow: Follow
) -> None:
    feed = follow(publisher, replay=False)
    await heard(publisher, feed)
    await publisher.publish(stored([1, 2, 3]))
    await eventually(lambda: held(index) == 3)
    await publisher.publish(removed([1, 2, 3]), send=False)
    await publisher.publish(stored([1]))
    await eventually(lambda: held(index) == 1)
    await eventually(lambda: feed.state.healed["relearn"] >= 1)


async def test_what_the_engine_cannot_replay_any_more_is_forgotten(index: KvIndex, follow: Follow) -> None:
    publisher = Publisher(kept=2)
    try:
        feed = follow(publisher)
        await heard(publisher, feed)
        await publisher.publish(stored([1, 2, 3]))
        await eventually(lambda: held(index) == 3)
        await publisher.publish(removed([1, 2, 3]), send=False)
        await publisher.publish(stored([1, 2]), send=False)
        await publisher.publish(removed([999]), send=False)
        await publisher.publish(removed([2]))
        await eventually(lambda: feed.state.healed["relearn"] == 1)
        await publisher.publish(stored([1]))
        await eventually(lambda: held(index) == 1)
    finally:
        publisher.close()


async def test_case_14_an_engine_that_restarts_with_sequence_0_loses_its_old_blocks(
    publisher: Publisher, index: KvIndex, follow: Follow
) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    await publisher.publish(stored([1, 2, 3]))
    await eventually(lambda: held(index) == 3)
    publisher.restart()
    await publisher.publish(stored([1]))
    await eventually(lambda: held(index) == 1)
    assert feed.state.restarts == 1


async def test_a_restart_whose_first_events_were_lost(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    for number in range(5):
        await publisher.publish(stored([10 + number]))
    await eventually(lambda: feed.state.batches >= 6)
    publisher.restart()
    await publisher.publish(stored([1, 2]), send=False)
    await publisher.publish(stored([3], 2, first=8))
    await eventually(lambda: held(index) == 3)
    await eventually(lambda: feed.state.healed["replay"] == 1)
    assert feed.state.restarts == 1


async def test_case_14_all_blocks_cleared_empties_hbm_and_dram(
    publisher: Publisher, index: KvIndex, follow: Follow
) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    await publisher.publish(stored([1, 2]), stored([1, 2], medium="CPU"))
    await publisher.publish(removed([1, 2]))
    await eventually(lambda: index.match(keys_of(2), ["e"])[0].dram == 2)
    await publisher.publish({"type": "AllBlocksCleared"})
    await eventually(lambda: index.match(keys_of(2), ["e"])[0] == (0, 0, 0))


async def test_junk_is_counted_and_passed_over(publisher: Publisher, index: KvIndex, follow: Follow) -> None:
    feed = follow(publisher)
    await heard(publisher, feed)
    number = publisher.number
    publisher.number += 1
    await publisher.send(number, b"\xc1junk")
    await publisher.publish({"type": "SomethingNew", "x": 1}, stored([1], future_field=[1]), stored([2], medium="TAPE"))
    await eventually(lambda: held(index) == 1)
    assert feed.state.ignored == {"unreadable": 1, "unknown_event": 1, "unknown_medium": 1}


async def test_case_14_events_configured_but_silent_with_traffic(index: KvIndex) -> None:
    now = 0.0
    feed = EngineFeed("e", "tcp://127.0.0.1:1", index, now=lambda: now)
    assert not feed.silent
    feed.asked()
    now += SILENT_SECONDS
    feed.asked()
    assert not feed.silent
    now += 0.1
    assert feed.silent


async def test_an_engine_that_comes_late_is_followed(index: KvIndex, follow: Follow) -> None:
    publisher = Publisher()
    port, replay = publisher.port, publisher.replay_port
    publisher.close()
    feed = EngineFeed("e", f"tcp://127.0.0.1:{port}", index)
    feed.start()
    try:
        await asyncio.sleep(0.1)
        late = Publisher()
        late._pub.bind(f"tcp://127.0.0.1:{port}")
        try:
            await heard(late, feed)
        finally:
            late.close()
    finally:
        await feed.stop()
    assert replay


async def test_a_replay_may_take_long_while_it_goes_on(
    publisher: Publisher, index: KvIndex, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_REPLAY_FIRST_SECONDS", 0.5)
    publisher.replay_pause_seconds = 0.3
    for number in range(3):
        await publisher.publish(stored([number + 1], number or None, first=BLOCK * number), send=False)
    feed = follow(publisher, replay=True)
    await eventually(lambda: index.match(keys_of(3), ["e"])[0].hbm == 3)
    assert not feed.state.failures


async def test_an_engine_that_does_not_replay_is_named(
    publisher: Publisher,
    index: KvIndex,
    follow: Follow,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine, "_REPLAY_FIRST_SECONDS", 0.05)
    publisher.replay_pause_seconds = 30.0
    await publisher.publish(stored([1]), send=False)
    feed = follow(publisher, replay=True)
    await eventually(lambda: feed.state.failures["replay"] == 1)
    assert "no replay of KV events from e: it did not answer in time" in caplog.text
