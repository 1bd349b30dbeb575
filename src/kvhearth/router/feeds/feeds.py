"""All feeds of one router: started, stopped and shown together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import router_feeds as names
from kvhearth.router.feeds.engine import EngineFeed
from kvhearth.router.feeds.ports import FeedState, Index
from kvhearth.router.feeds.store import Holdings, StoreFeed
from kvhearth.store.protocol.tls import TlsSettings

log = logging.getLogger(__name__)


class EngineEvents(NamedTuple):
    """Where an engine tells of its KV; a data-parallel rank's ports are these plus the rank.

    ``events`` and ``replay`` are ``tcp://host:port`` or ``ipc:///path``, ``snapshot`` is ``host:port``; "" = none.
    """

    events: str
    replay: str = ""
    snapshot: str = ""


class Feeds:
    """Keeps one feed a target and one a store node.

    Args:
        index: to be told.
        pool: name of the engines' pool in the index, whose store is followed.
        snapshot_token: bearer token for snapshots; "" = none.
    """

    def __init__(self, index: Index, pool: str = "", *, snapshot_token: str = "") -> None:
        self._index = index
        self._pool = pool
        self._token = snapshot_token
        self._engines: dict[str, EngineFeed] = {}
        self._holdings = Holdings(pool, index)
        self._stores: list[StoreFeed] = []
        self._silent: set[str] = set()

    def add(self, targets: Sequence[str], at: EngineEvents) -> None:
        """Follow an engine: one target, or one a rank."""
        for rank, target in enumerate(targets):
            self._index.join(target, self._pool)
            feed = EngineFeed(
                target,
                _offset(at.events, rank),
                self._index,
                replay=_offset(at.replay, rank),
                snapshot=_offset(at.snapshot, rank),
                snapshot_token=self._token,
            )
            self._engines[target] = feed
            feed.start()

    def follow_store(
        self,
        nodes: Iterable[str],
        *,
        user: str = "default",
        password: str | None = None,
        tls: TlsSettings | None = None,
    ) -> None:
        """Follow the nodes of the pool's store."""
        for node in nodes:
            feed = StoreFeed(node, self._holdings, user=user, password=password, tls=tls)
            self._stores.append(feed)
            feed.start()

    def remove(self, target: str) -> Coroutine[None, None, None]:
        """The target is gone for good, and another of its name may come at once. Awaiting this ends its feed."""
        feed = self._engines.pop(target, None)
        if feed is not None:
            feed.cancel()
        self._index.leave(target)
        self._silent.discard(target)
        return _ended(feed)

    async def stop(self) -> None:
        """End all."""
        engines = [feed.stop() for feed in self._engines.values()]
        await asyncio.gather(*engines, *[feed.stop() for feed in self._stores])

    def asked(self, target: str) -> None:
        """A request was sent there that should change what it holds."""
        feed = self._engines.get(target)
        if feed is not None:
            feed.asked()

    def restarted(self, target: str) -> None:
        """The engine was away, and with it what it held."""
        feed = self._engines.get(target)
        if feed is not None:
            feed.restarted()

    def check(self) -> None:
        """Say who gets requests and tells nothing. To be called now and then."""
        for target, feed in self._engines.items():
            silent = feed.state.silent = feed.silent
            if silent and target not in self._silent:
                self._silent.add(target)
                self._index.set_silence(target, "silent")
                log.warning(
                    "%s gets requests and publishes no KV events%s",
                    target,
                    " any more: does it hang?"
                    if feed.state.batches
                    else ": does it run with --kv-events-config, and is the address right?",
                )
            elif not silent:
                self._silent.discard(target)

    def metrics(self) -> Iterable[MetricFamily]:
        """For the registry."""
        sources: list[tuple[str, FeedState]] = [(name, feed.state) for name, feed in self._engines.items()]
        sources += [(f"store {feed.address}", feed.state) for feed in self._stores]
        yield MetricFamily(names.BATCHES, [((name,), float(state.batches)) for name, state in sources])
        yield MetricFamily(names.LAG_SECONDS, [((name,), state.lag_seconds) for name, state in sources])
        yield MetricFamily(names.SILENT, [((name,), float(state.silent)) for name, state in sources])
        yield MetricFamily(names.RESTARTS, [((name,), float(state.restarts)) for name, state in sources])
        yield MetricFamily(names.DUPLICATES, [((name,), float(state.duplicates)) for name, state in sources])
        for metric, what in ((names.IGNORED, "ignored"), (names.HEALED, "healed"), (names.FAILURES, "failures")):
            yield MetricFamily(
                metric,
                [((name, why), float(count)) for name, state in sources for why, count in getattr(state, what).items()],
            )
        stores = [((feed.address,), float(feed.state.connected)) for feed in self._stores]
        yield MetricFamily(names.STORE_CONNECTED, stores)
        yield MetricFamily(names.STORE_CHUNKS, [((), float(len(self._holdings)))])


async def _ended(feed: EngineFeed | None) -> None:
    if feed is not None:
        await feed.stop()


def _offset(address: str, rank: int) -> str:
    """The address with the port moved by the rank, as vLLM moves those of data-parallel ranks."""
    if not address or not rank:
        return address
    if address.startswith("ipc://"):
        return f"{address}_dp{rank}"
    parts = urlsplit(address if "://" in address else f"//{address}")
    head, _, port = address.rpartition(":")
    return f"{head}:{int(parts.port or port) + rank}"
