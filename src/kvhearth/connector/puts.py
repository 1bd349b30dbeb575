"""Chunks of chains into the store: none without the one before it, none that is there already."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.ring.client import StoreRing

_ASK_SECONDS = 0.5
_MOST_TO_TAKE_BACK = 4096

_log = logging.getLogger(__name__)


class PutItem(NamedTuple):
    """One chunk to put.

    Attributes:
        key: its name in the store.
        chunk_id: its row in DRAM.
        parent: name of the chunk before it in the chain, which must be in the store first; None: it needs none.
        position: its place in the chain, from 0.
        group: sharing group (u32 of the request's ``cache_salt``; 0: none).
        epoch: u64 of the weights epoch.
        pin: keep it from eviction.
    """

    key: bytes
    chunk_id: int
    parent: bytes | None
    position: int
    group: int = 0
    epoch: int = 0
    pin: bool = False


class ChainPuts:
    """Puts batch after batch, on one thread.

    Args:
        client: the store.
        row_of: a chunk's row in DRAM.
        timeout_seconds: deadline of sending a batch.
    """

    def __init__(
        self, client: StoreClient | StoreRing, row_of: Callable[[int], memoryview], timeout_seconds: float
    ) -> None:
        self._client = client
        self._row_of = row_of
        self._timeout_seconds = timeout_seconds
        self._take_back: OrderedDict[bytes, bytes] = OrderedDict()
        self._told_of_pins = False

    def put(self, items: list[PutItem]) -> list[str]:
        """Store them in this order; an outcome each: ``stored``, ``present``, ``orphan`` or ``failed``."""
        if not self._delete_orphans():
            return ["failed"] * len(items)  # the store is away
        keys = [item.key for item in items]
        own = set(keys)
        outside = list(dict.fromkeys(i.parent for i in items if i.parent is not None and i.parent not in own))
        asked = keys + outside
        has = dict(zip(asked, self._client.exists_many(asked, timeout_seconds=_ASK_SECONDS), strict=True))
        outcomes, new = self._sort_out(items, has)
        if new:
            self._send(items, new, outcomes)
            sent = {items[index].key: outcomes[index] for index in new}
            for index, item in enumerate(items):
                if outcomes[index] == "twin":  # of one that went out just now: it is there if that one arrived
                    outcomes[index] = "present" if sent[item.key] == "stored" else sent[item.key]
        pins = [
            item.key for item, out in zip(items, outcomes, strict=True) if item.pin and out in ("stored", "present")
        ]
        if pins and not self._client.pin(pins, timeout_seconds=_ASK_SECONDS) and not self._told_of_pins:
            self._told_of_pins = True
            _log.warning("the store does not pin chunks: it is full of pins, or does not know KV.PIN")
        return outcomes

    def _sort_out(self, items: list[PutItem], has: dict[bytes, bool]) -> tuple[list[str], list[int]]:
        """Outcomes known without sending anything, and the indices of what is to be sent."""
        outcomes, new = [], []
        on_the_way: set[bytes] = set()
        for index, item in enumerate(items):
            if has[item.key]:
                outcomes.append("present")
            elif item.key in on_the_way:
                outcomes.append("twin")
            elif item.parent is None or has.get(item.parent) or item.parent in on_the_way:
                on_the_way.add(item.key)
                new.append(index)
                outcomes.append("failed")
            else:
                outcomes.append("orphan")
        return outcomes, new

    def _send(self, items: list[PutItem], new: list[int], outcomes: list[str]) -> None:
        puts = []
        for index in new:
            item = items[index]
            parent = xxhash.xxh3_64_intdigest(item.parent) if item.parent else 0
            header = Header(position=item.position, parent=parent, group=item.group, epoch=item.epoch)
            puts.append(Put(item.key, header, self._row_of(item.chunk_id)))
        results = self._client.put_many(puts, timeout_seconds=self._timeout_seconds)
        lost: set[bytes] = set()
        for index, result in zip(new, results, strict=True):
            item = items[index]
            if (
                item.parent is not None and item.parent in lost
            ):  # refused after all; whether the child arrived or not, nobody could reach it
                lost.add(item.key)
                self._take_back[item.key] = item.parent
                outcomes[index] = "orphan"
            elif not result.stored:
                lost.add(item.key)
            else:
                outcomes[index] = "stored"
        self._delete_orphans()

    def _delete_orphans(self) -> bool:
        """Take back chunks that may have arrived without the one before, unless that has come since; False when the
        store did not answer, so that it is to be tried again."""
        while len(self._take_back) > _MOST_TO_TAKE_BACK:
            self._take_back.popitem(last=False)
        if not self._take_back:
            return True
        parents = list(dict.fromkeys(self._take_back.values()))
        has = dict(zip(parents, self._client.exists_many(parents, timeout_seconds=_ASK_SECONDS), strict=True))
        orphans: set[bytes] = set()
        for key, parent in self._take_back.items():
            if parent in orphans or not has[parent]:
                orphans.add(key)
        if orphans and not self._client.delete_many(list(orphans), timeout_seconds=_ASK_SECONDS):
            return False
        self._take_back.clear()
        return True
