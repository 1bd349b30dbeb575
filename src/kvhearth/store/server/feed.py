"""Events on a connection: KV.EVENTS, which begins with a snapshot and loses nothing silently, and SUBSCRIBE for clients
that know Redis's channels. What happened is `kvhearth.store.dram.events`' to say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import groupby

from kvhearth.store.dram.events import Event, EventKind, EventLog, Follower
from kvhearth.store.dram.shares import namespace_of
from kvhearth.store.dram.table import DRAM
from kvhearth.store.protocol.packed import pack_keys
from kvhearth.store.server.session import Session

CHANNEL = b"kv.events"
"""Channel of all events; ``kv.events.<namespace>`` has those of one namespace."""

_BATCH = 1024
_PING_SECONDS = 5.0
_MAX_CHANNELS = 64
_TOO_MANY = "ERR too many clients follow events"


def events(session: Session, args: list[bytes]) -> None:
    """KV.EVENTS [FROM boot-id sequence] [NAMESPACE name]: from here on the connection carries arrays:

    ``hello boot-id sequence``; then, unless it goes on from a sequence that is still known, ``snapshot sequence tier
    keys`` as often as it takes; ``live sequence``; and from then on ``put`` or ``evict``, ``sequence tier keys``,
    ``clear sequence tier``, ``ping sequence``, and ``gap sequence`` when the client fell too far behind: it forgets
    all, and a snapshot follows. ``keys`` are packed, ``sequence`` is that of the last event in the message.
    """
    start, namespace = None, None
    rest = iter(args)
    for option in rest:
        if option.upper() == b"FROM" and (boot_id := next(rest, None)) and (number := next(rest, b"")).isdigit():
            start = (boot_id, int(number[:18]))
        elif option.upper() == b"NAMESPACE" and (name := next(rest, None)) is not None:
            namespace = name
        else:
            session.replies.error("ERR syntax error")
            return
    follower = session.store.table.events.follow()
    if follower is None:
        session.replies.error(_TOO_MANY)
        return
    session.feed = EventFeed(session, follower, namespace, start)


def subscribe(session: Session, args: list[bytes]) -> None:
    feed = session.feed
    if len(set(args)) > _MAX_CHANNELS:
        session.replies.error(f"ERR more than {_MAX_CHANNELS} channels")
        return
    if feed is None:
        follower = session.store.table.events.follow()
        if follower is None:
            session.replies.error(_TOO_MANY)
            return
        session.feed = feed = ChannelFeed(session, follower)
    if not isinstance(feed, ChannelFeed):
        session.replies.error("ERR this connection carries KV.EVENTS")
    elif len(feed.channels | set(args)) > _MAX_CHANNELS:
        session.replies.error(f"ERR more than {_MAX_CHANNELS} channels")
    else:
        for channel in args:
            feed.channels.add(channel)
            _answer(session, "subscribe", channel, len(feed.channels))


def unsubscribe(session: Session, args: list[bytes]) -> None:
    feed = session.feed if isinstance(session.feed, ChannelFeed) else None
    channels = feed.channels if feed is not None else set()
    leaving: list[bytes | None] = [*(args or sorted(channels))]
    for channel in leaving or [None]:
        channels.discard(channel or b"")
        _answer(session, "unsubscribe", channel, len(channels))
    if feed is not None and not channels:
        feed.close()
        session.feed = None


def _answer(session: Session, kind: str, channel: bytes | None, count: int) -> None:
    session.replies.push(3)
    session.replies.bulk(kind)
    if channel is None:
        session.replies.null()
    else:
        session.replies.bulk(channel)
    session.replies.integer(count)


def _may_know(session: Session, key: bytes) -> bool:
    return session.may("read") and session.may_use(key)


class EventFeed:
    """What `events` promises, written a piece at a time."""

    def __init__(
        self, session: Session, follower: Follower, namespace: bytes | None, start: tuple[bytes, int] | None
    ) -> None:
        self._session = session
        self._log: EventLog = session.store.table.events
        self._follower = follower
        self._namespace = namespace
        self.fd = follower.fd
        self._at = self._log.last
        self._snapshot: Iterator[tuple[bytes, list[bytes]]] | None = None
        self._told_at = 0.0
        self._tell("hello", self._log.boot_id, self._at)
        if start is not None and start[0] == self._log.boot_id.encode() and self._log.since(start[1], 1) is not None:
            self._at = start[1]
            self._tell("live", self._at)
        else:
            self._snapshot = self._keys()

    def pump(self) -> bool:
        self._session.refresh_user()  # the user may be gone, or have other rights by now
        self._follower.attend()
        if self._snapshot is not None:
            self._tell_snapshot()
            return True
        new = self._log.since(self._at, _BATCH)
        if new is None:
            self._at = self._log.last
            self._tell("gap", self._at)
            self._snapshot = self._keys()
            return True
        for (kind, tier, _), group in groupby(new, key=lambda event: (event.kind, event.tier, len(event.key))):
            happened = list(group)
            self._at += len(happened)
            self._tell_events(kind, tier, happened)
        if time.monotonic() - self._told_at > _PING_SECONDS:  # idle, or nothing that concerns this client
            self._tell("ping", self._at)
        return len(new) == _BATCH

    def close(self) -> None:
        self._follower.close()

    def _tell_snapshot(self) -> None:
        part = next(self._snapshot, None) if self._snapshot is not None else None
        if part is None:
            self._snapshot = None
            self._tell("live", self._at)
            return
        tier, keys = part
        for _, alike in groupby(sorted(filter(self._concerns, keys), key=len), key=len):
            self._tell_keys("snapshot", tier, list(alike))

    def _tell_events(self, kind: EventKind, tier: bytes, happened: list[Event]) -> None:
        if kind is EventKind.CLEAR:
            self._tell(kind.value, self._at, tier)
            return
        keys = [event.key for event in happened if self._concerns(event.key)]
        if keys:
            self._tell_keys(kind.value, tier, keys)

    def _tell_keys(self, kind: str, tier: bytes, keys: list[bytes]) -> None:
        self._tell(kind, self._at, tier, pack_keys(keys) or b"")

    def _tell(self, *fields: str | bytes | int) -> None:
        self._told_at = time.monotonic()
        replies = self._session.replies
        replies.push(len(fields))
        for value in fields:
            if isinstance(value, int):
                replies.integer(value)
            else:
                replies.bulk(value)

    def _concerns(self, key: bytes) -> bool:
        return _may_know(self._session, key) and (self._namespace is None or namespace_of(key) == self._namespace)

    def _keys(self) -> Iterator[tuple[bytes, list[bytes]]]:
        store = self._session.store
        cursor = 0
        while True:
            keys, cursor = store.table.keys_from(cursor, _BATCH)
            yield DRAM, keys
            if not cursor:
                break
        for tier in store.tiers:
            keys = []
            for key in tier.keys():  # noqa: SIM118 - a tier is no mapping
                keys.append(key)
                if len(keys) == _BATCH:
                    yield tier.letter, keys
                    keys = []
            yield tier.letter, keys


class ChannelFeed:
    """Events as messages of Redis's channels, in JSON; one that says ``gap`` when some were missed."""

    def __init__(self, session: Session, follower: Follower) -> None:
        self._session = session
        self._log: EventLog = session.store.table.events
        self._follower = follower
        self.fd = follower.fd
        self.channels: set[bytes] = set()
        self._at = self._log.last

    def pump(self) -> bool:
        self._session.refresh_user()  # the user may be gone, or have other rights by now
        self._follower.attend()
        new = self._log.since(self._at, _BATCH)
        if new is None:
            self._at = self._log.last
            for channel in sorted(self.channels):
                self._tell(channel, {"event": "gap", "sequence": self._at})
            return False
        for event in new:
            self._at += 1
            self._tell_event(event)
        return len(new) == _BATCH

    def close(self) -> None:
        self._follower.close()

    def _tell_event(self, event: Event) -> None:
        namespace = namespace_of(event.key)
        if event.kind is not EventKind.CLEAR and not _may_know(self._session, event.key):
            return
        told: dict[str, object] = {"event": event.kind.value, "sequence": self._at, "tier": event.tier.decode()}
        if event.key:
            told |= {"namespace": namespace.decode("ascii", "backslashreplace"), "key": event.key.hex()}
        for channel in (CHANNEL, CHANNEL + b"." + namespace):
            if channel in self.channels:
                self._tell(channel, told)

    def _tell(self, channel: bytes, told: dict[str, object]) -> None:
        replies = self._session.replies
        replies.push(3)
        replies.bulk("message")
        replies.bulk(channel)
        replies.bulk(json.dumps(told, separators=(",", ":")))
