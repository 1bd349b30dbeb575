"""The fuzz of what the router reads beside HTTP, called directly: token ids, requests' shapes, KV events, the store's
feed, the index and the policies. Each takes values right and wrong, and may raise its documented error alone.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec

from kvhearth.router.body import BadBody, read_body, read_fields, routable_of, with_model
from kvhearth.router.feeds import wire
from kvhearth.router.feeds.store import Holdings, StoreFeed, _message
from kvhearth.router.kv import BlockSizes
from kvhearth.router.tokens.shapes import Chat, MultiModal, Text, asked_of
from kvhearth.router.usage import read_usage
from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.ports import EngineView, Hits, Policy, RouteRequest
from kvhearth.routing.registry import KvParts, make_policy
from kvhearth.store.client.async_wire import open_wire
from kvhearth.store.client.outcomes import Miss
from kvhearth.store.protocol.address import Address
from kvhearth.store.protocol.packed import PackedKeysError
from support.fuzz_chats import chats
from support.fuzz_events import event_batch, store_bytes, store_message
from support.fuzzing import FIELDS, PATHS, damaged, odd_body, odd_value, plain_body

INDEX_BYTES = 1 << 18


class Api:
    """State that lives through a run: an index under all that is told, policies over it, a store's feed."""

    def __init__(self) -> None:
        self.index = BlockSizes(max_bytes=INDEX_BYTES, now=time.monotonic)
        parts = KvParts(self.index)
        names = ("round-robin", "random", "least-loaded", "session", "prefix", KvAware.name)
        self.policies: list[Policy] = [make_policy(name, kv=parts) for name in names]
        self.feed = StoreFeed("127.0.0.1:1", Holdings("", self.index, most=2000))
        self.targets: tuple[Callable[[random.Random], Any], ...] = (
            self.events,
            bodies,
            shapes,
            self.events,
            keys,
            self.picks,
            self.store_messages,
            usages,
            chats,
        )

    def one(self, number: int, rng: random.Random) -> None:
        """The ``number``-th input. Raises what should not have been raised."""
        self.targets[number % len(self.targets)](rng)

    def events(self, rng: random.Random) -> None:
        """Events of an engine, to the index; what it says of itself must stay true."""
        try:
            batch = wire.decode(event_batch(rng))
        except ValueError:
            return
        target = rng.choice(("a", "b", "c#1"))
        for event in batch.events:
            why = wire.apply(event, target, self.index, whole=rng.random() < 0.1)
            assert why in {"", "unknown_medium", "remote"}, why
        if rng.random() < 0.02:
            rng.choice((self.index.forget, self.index.leave, self.index.cleared))(target)
        assert self.index.nbytes <= 2 * INDEX_BYTES, f"the index has {self.index.nbytes} bytes"
        for name, size in self.index.block_tokens.items():
            assert size > 0, f"a block of {name} has {size} tokens"

    def picks(self, rng: random.Random) -> None:
        """Every policy, for any request among any engines: one of these, or a named refusal."""
        numbers = (0, 0, 1, 7, 10**6, 2**63)
        views = [
            EngineView(
                name,
                rng.choice(numbers),
                rng.choice(numbers),
                rng.choice(numbers),
                rng.choice(numbers),
                rng.choice(numbers),
                rng.choice((0.25, 1.0, 4.0)),
            )
            for name in rng.sample(("a", "b", "c#1", "unheard", "\ud800"), rng.randrange(5))
        ]
        ids = list(range(rng.randrange(60)))
        keyed = rng.random() < 0.7
        request = RouteRequest(
            rng.choice(("m", "", "\ud800", "漢" * 50)),
            [rng.getrandbits(64) for _ in range(rng.randrange(6))],
            rng.choice((len(ids), len(ids), 10**9)),
            rng.choice(("", "s", "\ud800")),
            block_keys(ids, 4, chain_seed()) if keyed else (),
            4 if keyed else 0,
            "" if keyed else rng.choice(("", "late")),
        )
        for policy in self.policies:
            decision = policy.pick(request, views)
            assert (decision.engine in {view.name for view in views}) != (decision.refusal is not None), decision
            assert min(decision.hits) >= 0, decision
            if decision.hits != Hits():
                assert sum(decision.hits) <= max(request.prompt_tokens, 0), decision
            if isinstance(policy, KvAware):
                policy.scores(request, views)
            if rng.random() < 0.02:
                policy.engine_gone("a")

    def store_messages(self, rng: random.Random) -> None:
        """Events of the store, as they were read."""
        try:
            self.feed._take(store_message(rng))
        except (Miss, PackedKeysError):
            return
        assert len(self.feed.state.events) < 20, self.feed.state.events


def bodies(rng: random.Random) -> None:
    """Bodies, read for routing and read whole: both say the same."""
    body = (plain_body if rng.random() < 0.3 else odd_body)(rng, "0" * 16, "good")
    if rng.random() < 0.3:
        body = damaged(rng, body)
    kind = rng.choice((b"application/json", b"", b"multipart/form-data; boundary=b", b"multipart/form-data"))
    try:
        found = read_body(body, kind)
        whole = found if kind.startswith(b"multipart") else routable_of(read_fields(body))
    except BadBody:
        return
    assert whole == found
    if found.model is not None:
        try:
            other = read_body(with_model(body, kind, "n\u00e9w"), kind)
        except BadBody:
            return
        assert other == found._replace(model="n\u00e9w", tokens=other.tokens), (found, other)


def shapes(rng: random.Random) -> None:
    """What a body asks to be tokenized; an engine can be asked for it in JSON."""
    fields: dict[str, Any] = {name: odd_value(rng) for name in rng.sample(FIELDS, rng.randint(0, 8))}
    if rng.random() < 0.6:
        messages = [odd_value(rng, 3) for _ in range(rng.randrange(4))]
        fields[rng.choice(("messages", "input"))] = [
            {"role": rng.choice(("user", "assistant", "tool", "system")), **one} if isinstance(one, dict) else one
            for one in messages
        ]
    asked = asked_of(rng.choice(PATHS), fields)
    assert asked is None or isinstance(asked, list | Text | Chat | MultiModal), asked
    if isinstance(asked, Text | Chat):
        assert asked.shapes
        msgspec.json.encode(asked.question())


def keys(rng: random.Random) -> None:
    """Keys of token ids, and of what is none."""
    ids: list[Any] = [rng.randrange(2**32) for _ in range(rng.randrange(40))]
    right = rng.random() < 0.5
    if not right:
        ids.insert(rng.randint(0, len(ids)), rng.choice((-1, 2**32, 1.5, "1", None, b"", [], 2**70)))
        ids += [0] * 4
    odd = [{"a": b"x", 1: 2, b"x": 1}], [[{None: 1, "": 2}]]
    extra = [rng.choice((None, [b"x", 1], *(() if right else odd))) for _ in ids]
    try:
        found = block_keys(ids, 4, chain_seed("l", "s"), extra if rng.random() < 0.3 else None)
    except ValueError:
        assert not right, ids
        return
    assert right, ids
    assert len(found) == len(ids) // 4
    assert all(0 < key < 2**60 for key in found)


def usages(rng: random.Random) -> None:
    """The end of any answer."""
    text = damaged(rng, b'x"usage": {"prompt_tokens": 5, "completion_tokens":7,"cached_tokens":1}}' * rng.randint(1, 3))
    found = read_usage(text[:20], text[20:])
    assert found is None or min(found) >= 0


async def feed_wire(rng: random.Random, times: int) -> None:
    """The store's feed over a socket: bytes of any kind end in a message or in the feed's own error."""
    sent = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    feed = StoreFeed(str(address), Holdings("", KvIndex(max_bytes=INDEX_BYTES, now=time.monotonic)))
    for _ in range(times):
        sent = store_bytes(rng)
        connection = await open_wire(address, None)
        try:
            async with asyncio.timeout(5):
                while True:
                    feed._take(await _message(connection))
        except (Miss, PackedKeysError):
            pass
        except BaseException:
            print(f"the store's feed read {sent!r}")
            raise
        finally:
            connection.close()
    server.close()
