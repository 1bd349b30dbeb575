"""Questions about what one node holds, for the command line: one connection, and errors in words instead of misses."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvhearth.errors import UserError
from kvhearth.store.client.connections import Connections
from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.dram.shares import namespace_of
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.tls import ClientTls, TlsSettings

_T = TypeVar("_T")

PAGE_KEYS = 1000
_MOST_REPLY_BYTES = 4 * 2**20
_MOST_KEY_BYTES = 64 * 1024
_NOT_ALLOWED = ("NOAUTH", "NOPERM", "WRONGPASS")
_GLOB = re.compile(rb"[*?\[\\]")


class Held(NamedTuple):
    """A key and the length of its value."""

    key: bytes
    nbytes: int


class Admin:
    """A connection to a node of a store, ours or a Redis.

    Args:
        address: ``host:port`` or ``unix:/path``: one node.
        timeout_seconds: longest wait for each answer.
        where: the option that named the address, for errors.

    Raises (every method, too):
        UserError: no answer, or the node refuses.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_seconds: float = 2.0,
        user: str = "default",
        password: str | None = None,
        tls: TlsSettings | None = None,
        where: str = "address",
    ) -> None:
        self._address = parse_address(address, where=where)
        self._timeout_seconds = timeout_seconds
        self._where = where
        self._connections = Connections(
            self._address,
            1,
            login=(user, password) if password is not None else None,
            secure=ClientTls(tls) if tls is not None and not self._address.is_unix else None,
        )

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave."""
        self._connections.close()

    def stats(self) -> dict[str, Any]:
        """KV.STATS; of a Redis, which has none, INFO as flat names and texts."""
        try:
            answer = self._ask(lambda wire, deadline: _bulk(wire, deadline, encode_command(b"KV.STATS")))
            stats: dict[str, Any] = json.loads(answer)
            return stats
        except _RefusedError as refused:
            if "unknown command" not in refused.what:
                raise
        text = self._ask(lambda wire, deadline: _bulk(wire, deadline, encode_command(b"INFO")))
        lines = [line.partition(":") for line in text.decode("utf-8", "backslashreplace").splitlines()]
        return {name: value for name, colon, value in lines if colon and not name.startswith("#")}

    def count(self) -> int:
        """DBSIZE."""
        return self._ask(lambda wire, deadline: _integer(wire, deadline, encode_command(b"DBSIZE")))

    def pages(self, namespace: str | None = None) -> Iterator[list[bytes]]:
        """Every key, or those of a namespace, some at a time; keys that come or go meanwhile may be left out."""
        cursor = b"0"
        while True:
            cursor, keys = self._scan(cursor, namespace)
            yield keys
            if cursor == b"0":
                return

    def lengths(self, keys: Sequence[bytes]) -> list[Held]:
        """Length of the value under each of up to `PAGE_KEYS` keys; 0 where it has gone. Touches none of them."""

        def ask(wire: WireConnection, deadline: float) -> list[Held]:
            wire.send([b"".join([encode_command(b"STRLEN", key) for key in keys])], deadline)
            return [Held(key, wire.integer(deadline)) for key in keys]

        return self._ask(ask)

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete keys; how many were there."""
        if not keys:
            return 0
        return self._ask(lambda wire, deadline: _integer(wire, deadline, encode_command(b"DEL", *keys)))

    def clear(self) -> None:
        """Delete everything, in every tier."""

        def ask(wire: WireConnection, deadline: float) -> None:
            wire.send([encode_command(b"FLUSHDB")], deadline)
            wire.status(deadline)

        self._ask(ask)

    def _scan(self, cursor: bytes, namespace: str | None) -> tuple[bytes, list[bytes]]:
        args = [cursor, b"COUNT", b"%d" % PAGE_KEYS]
        if namespace is not None:
            args += [b"MATCH", _GLOB.sub(_literal, namespace.encode()) + b":*"]

        def ask(wire: WireConnection, deadline: float) -> tuple[bytes, list[bytes]]:
            wire.send([encode_command(b"SCAN", *args)], deadline)
            if wire.array_length(deadline) != 2:
                raise Miss(MissReason.PROTOCOL, "SCAN")
            following = _read_bulk(wire, deadline, 32)
            return following, [_read_bulk(wire, deadline, _MOST_KEY_BYTES) for _ in range(wire.array_length(deadline))]

        following, keys = self._ask(ask)
        if namespace is not None:  # the pattern cannot say that the namespace ends at the first colon
            keys = [key for key in keys if namespace_of(key) == namespace.encode()]
        return following, keys

    def _ask(self, ask: Callable[[WireConnection, float], _T]) -> _T:
        deadline = time.monotonic() + self._timeout_seconds
        wire = None
        try:
            wire = self._connections.take(deadline)
            answer = ask(wire, deadline)
        except Miss as miss:
            if wire is not None:
                self._connections.discard(wire)
            raise self._error(miss) from None
        self._connections.give_back(wire)
        return answer

    def _error(self, miss: Miss) -> UserError:
        if miss.reason is MissReason.REFUSED:
            return _RefusedError(
                f"{self._address} refuses: {miss.detail}",
                where=self._where,
                remedy="give a user and password that may do this" if miss.detail.startswith(_NOT_ALLOWED) else "",
            )
        return UserError(
            f"no answer from {self._address} ({miss})",
            where=self._where,
            remedy="start it with 'kvhearth store serve', or give its address, user and password",
        )


class _RefusedError(UserError):
    """The node answered with an error."""


def _literal(special: re.Match[bytes]) -> bytes:
    """A character as a pattern for itself, in brackets: not every server takes a backslash for an escape; for a
    backslash, which means one in brackets too, any character."""
    return b"?" if special[0] == b"\\" else b"[%b]" % special[0]


def _bulk(wire: WireConnection, deadline: float, command: bytes) -> bytes:
    wire.send([command], deadline)
    return _read_bulk(wire, deadline, _MOST_REPLY_BYTES)


def _integer(wire: WireConnection, deadline: float, command: bytes) -> int:
    wire.send([command], deadline)
    return wire.integer(deadline)


def _read_bulk(wire: WireConnection, deadline: float, limit: int) -> bytes:
    length = wire.bulk_length(deadline) or 0
    if length > limit:
        raise Miss(MissReason.PROTOCOL, f"a reply of {length} bytes")
    data = bytearray(length)
    wire.read_into([memoryview(data)], deadline)
    wire.crlf(deadline)
    return bytes(data)
