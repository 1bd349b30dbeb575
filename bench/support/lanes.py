"""Ways to move values between a benchmark and what it measures, one class each: the lean RESP client, the store's
memory shared, a lower tier, bare sockets, a copy in memory. A lane belongs to one thread.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Protocol

import numpy as np

from kvhearth.store.client.attachment import Attachment
from kvhearth.store.client.lent_rows import Lender
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import Address, connect
from kvhearth.store.protocol.grants import Grant
from kvhearth.store.protocol.sockets import keep_in_cache
from kvhearth.store.tiers.port import Tier

CALL_SECONDS = 20.0
RAW_REQUEST = struct.Struct("<cBQ")
"""A bare socket's request: ``G`` or ``P``, the slot of memory, bytes."""
TOGETHER_BYTES = 33 * 2**19
"""Grants are asked for so many bytes of values at once: 8 of 2 MiB with their headers, or one of 16 MiB."""


class Lane(Protocol):
    """One connection. ``slot`` names a value; a lane is asked for those that were put only."""

    def get(self, slot: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the value of its size."""

    def put(self, slot: int, row: memoryview) -> None:
        """Store ``row``, and return once that is acknowledged."""

    def close(self) -> None:
        """End it."""


class RespLane:
    """The lean client: one round trip a value, from and into the caller's buffer, without header and checksum."""

    def __init__(self, address: Address) -> None:
        self._wire = WireConnection(address, deadline())

    def get(self, slot: int, buffer: memoryview) -> None:
        self._wire.send([encode_command(b"GET", value_key(slot, len(buffer)))], deadline())
        if self._wire.bulk_length(deadline()) != len(buffer):
            raise SystemExit("a value that was put is gone")
        self._wire.read_into([buffer], deadline())
        self._wire.crlf(deadline())

    def put(self, slot: int, row: memoryview) -> None:
        key = value_key(slot, len(row))
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(row))
        self._wire.send([head, row, b"\r\n"], deadline())
        self._wire.status(deadline())

    def count(self, request: bytes) -> int:
        """How many keys there are, as EXISTS answers (a number) and KV.MATCH (a letter for each)."""
        self._wire.send([request], deadline())
        line = self._wire.line(deadline())
        if line.startswith(b"$"):
            self._wire.skip(int(line[1:]), deadline())
            self._wire.crlf(deadline())
        return int(line[1:])

    def close(self) -> None:
        self._wire.close()


class SharedLane:
    """The store's memory, mapped: grants travel over a unix socket, values are copied by the client itself. Grants are
    asked for some values at once, as the connector does; puts are acknowledged with the grants of the next ones."""

    def __init__(self, address: Address, attachment: Attachment) -> None:
        self._wire = WireConnection(address, deadline())
        mapping = attachment.of(self._wire, deadline())
        if mapping is None:
            raise SystemExit("the store does not share its memory")
        self._mapping = mapping
        self._lender = Lender(self._wire, mapping.nbytes)
        self._leased: dict[bytes, Grant] = {}
        self._reserved: dict[bytes, Grant] = {}
        self._filled: list[int] = []

    def get(self, slot: int, buffer: memoryview) -> None:
        keys = _keys_together(slot, len(buffer))
        if keys[0] not in self._leased:
            self._leased = dict(zip(keys, self._lender.lease(keys, deadline()), strict=True))
        grant = self._leased[value_key(slot, len(buffer))]
        if grant.nbytes != len(buffer):
            raise SystemExit("a value that was put is gone")
        self._mapping.copy_out(grant.pieces, [buffer])
        if slot % len(keys) == len(keys) - 1:
            self._leased = {}
            self._lender.end(deadline())

    def put(self, slot: int, row: memoryview) -> None:
        keys = _keys_together(slot, len(row))
        if keys[0] not in self._reserved:
            grants, stored = self._lender.reserve(keys, [len(row)] * len(keys), deadline(), commit=self._filled)
            self._filled = _all_kept(self._filled, stored)
            self._reserved = dict(zip(keys, grants, strict=True))
        grant = self._reserved[value_key(slot, len(row))]
        if grant.nbytes != len(row):
            raise SystemExit(f"the store lends no memory for a value: {grant.refusal}")
        self._mapping.copy_in([row], grant.pieces)
        self._filled.append(grant.number)
        if slot % len(keys) == len(keys) - 1:
            self._reserved = {}

    def close(self) -> None:
        if self._filled:
            _all_kept(self._filled, self._lender.commit(self._filled, deadline()))
        self._wire.close()


def _all_kept(numbers: list[int], stored: list[bool]) -> list[int]:
    if len(stored) != len(numbers) or not all(stored):
        raise SystemExit("the store does not keep a value")
    return []


def _keys_together(slot: int, nbytes: int) -> list[bytes]:
    """The keys that ``slot``'s grant is asked for with."""
    count = max(1, TOGETHER_BYTES // nbytes)
    first = slot - slot % count
    return [value_key(number, nbytes) for number in range(first, first + count)]


class TierLane:
    """A lower tier of the store, called as the store calls it."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def get(self, slot: int, buffer: memoryview) -> None:
        if not self._tier.read_into(value_key(slot, len(buffer)), [buffer], deadline()):
            raise SystemExit(f"the {self._tier.name} tier lost a value")

    def put(self, slot: int, row: memoryview) -> None:
        if not self._tier.write(value_key(slot, len(row)), [row]):
            raise SystemExit(f"the {self._tier.name} tier did not take a value")

    def close(self) -> None:
        pass


class RawLane:
    """Bare sockets to `support.raw_server`: what Python's threads and the kernel can do, and no more."""

    def __init__(self, address: Address) -> None:
        self._sock = connect(address, CALL_SECONDS)
        keep_in_cache(self._sock)
        self._answer = bytearray(1)

    def get(self, slot: int, buffer: memoryview) -> None:
        self._sock.sendall(RAW_REQUEST.pack(b"G", slot, len(buffer)))
        self._receive(buffer)

    def put(self, slot: int, row: memoryview) -> None:
        head = RAW_REQUEST.pack(b"P", slot, len(row))
        sent = self._sock.sendmsg([head, row])
        if sent < len(head) + len(row):
            self._sock.sendall(row[sent - len(head) :])
        self._receive(memoryview(self._answer))

    def close(self) -> None:
        self._sock.close()

    def _receive(self, view: memoryview) -> None:
        if self._sock.recv_into(view, len(view), socket.MSG_WAITALL) != len(view):
            raise SystemExit("the raw server is gone")


class MemcpyLane:
    """A copy within this process, from and to memory that is faulted in."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def get(self, slot: int, buffer: memoryview) -> None:
        self._copy(buffer, self._memory[slot * len(buffer) : (slot + 1) * len(buffer)])

    def put(self, slot: int, row: memoryview) -> None:
        self._copy(self._memory[slot * len(row) : (slot + 1) * len(row)], row)

    def _copy(self, target: memoryview, source: memoryview) -> None:
        # numpy lets other threads run while it copies, memoryview does not.
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))

    def close(self) -> None:
        pass


def value_key(slot: int, nbytes: int) -> bytes:
    """Key of a value, as long as the connector's are."""
    return b"%056d/%07d" % (nbytes, slot)


def deadline() -> float:
    """Until when a call that starts now may last (monotonic seconds)."""
    return time.monotonic() + CALL_SECONDS
