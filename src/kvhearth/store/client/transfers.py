"""How rows travel between a client and its store: over the connection, or copied by the client itself where the store
shares its memory. One exchange over a connection that the caller has; no retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvhearth.store.client.outcomes import GetResult, Miss, MissReason, PutResult
from kvhearth.store.client.rows import get_rows, is_unwell, put_rows
from kvhearth.store.client.tally import Tally
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import Address

if TYPE_CHECKING:
    from kvhearth.store.client.attachment import Attachment
    from kvhearth.store.client.mapping import Mapping

SHARED_FROM_BYTES = 64 * 1024
"""Calls whose longest row is no longer travel over the connection, where one round trip does."""


class Transfers:
    """Moves rows for one client. Thread-safe; what it fills in belongs to the call.

    Args:
        address: the store's. Memory is shared over unix sockets only.
        shared: whether to try that.
    """

    def __init__(self, address: Address, tally: Tally, *, shared: bool = True) -> None:
        self._tally = tally
        self._transport = "unix" if address.is_unix else "tcp"
        self._attachment: Attachment | None = None
        if address.is_unix and shared:
            from kvhearth.store.client.attachment import Attachment  # numpy, which other clients do without

            self._attachment = Attachment()

    def get(
        self,
        wire: WireConnection,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        results: list[GetResult | None],
        deadline: float,
    ) -> None:
        """Fill ``views`` with the rows under ``keys`` and ``results`` with what came of each. What fails its checksum
        is deleted from the store, if it lets us.

        Raises:
            Miss: the call cannot go on; ``results`` has what came before.
        """
        sent: Sequence[int] = range(len(keys))
        mapping = self._mapping(wire, views, deadline)
        if mapping is not None:
            from kvhearth.store.client.lent_rows import get_lent

            sent = get_lent(wire, mapping, keys, views, results, deadline)
            self._count("shared", "get", [result.nbytes for result in results if result is not None])
        get_rows(wire, keys, views, sent, results, deadline)
        found = [result for result in results if result is not None]
        self._count(self._transport, "get", [found[place].nbytes for place in sent])
        corrupt = [key for key, result in zip(keys, found, strict=True) if result.reason is MissReason.CHECKSUM]
        if corrupt:
            wire.send([encode_command(b"DEL", *corrupt)], deadline)
            try:
                wire.integer(deadline)
            except Miss as miss:
                if miss.reason is not MissReason.REFUSED or is_unwell(miss):
                    raise  # but who may only read leaves it to others

    def put(
        self,
        wire: WireConnection,
        keys: Sequence[bytes],
        headers: Sequence[bytes],
        rows: Sequence[memoryview],
        results: list[PutResult | None],
        deadline: float,
    ) -> None:
        """Store ``rows`` behind their packed ``headers`` under ``keys``, and fill ``results`` with what came of each.

        Raises:
            Miss: the call cannot go on; ``results`` has what came before.
        """
        sent: Sequence[int] = range(len(keys))
        mapping = self._mapping(wire, rows, deadline)
        if mapping is not None:
            from kvhearth.store.client.lent_rows import put_lent

            sent = put_lent(wire, mapping, keys, headers, rows, results, deadline)
            lent = set(range(len(keys))).difference(sent)
            self._count("shared", "put", [len(rows[place]) for place in lent if _stored(results[place])])
        put_rows(wire, keys, headers, rows, sent, results, deadline)
        self._count(self._transport, "put", [len(rows[place]) for place in sent if _stored(results[place])])

    def close(self) -> None:
        """Let go of the store's memory."""
        if self._attachment is not None:
            self._attachment.close()

    def _mapping(self, wire: WireConnection, rows: Sequence[memoryview], deadline: float) -> Mapping | None:
        if self._attachment is None or max(map(len, rows), default=0) <= SHARED_FROM_BYTES:
            return None
        return self._attachment.of(wire, deadline)

    def _count(self, transport: str, operation: str, lengths: Sequence[int]) -> None:
        if lengths:
            self._tally.moved(transport, operation, sum(lengths))


def _stored(result: PutResult | None) -> bool:
    return result is not None and result.stored
