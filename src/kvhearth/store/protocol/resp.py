"""Reading commands of the Redis protocol (RESP) from a byte stream, with every length checked before memory is spent.

Inline commands, but for a bare PING, are refused on purpose: a stray HTTP request must not be able to run anything.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Protocol

MAX_LINE_BYTES = 64
MAX_ARG_BYTES = 16 * 1024
MAX_ARGS = 16_384
MAX_ARGS_BYTES = 2**20
MAX_BULK_BYTES = 512 * 2**20
"""Longest value that is read at all, as in Redis; what a store keeps is bounded further by its configuration."""

_BUFFER_BYTES = 64 * 1024
_READ_BYTES = 32 * 1024  # small, so that little of a large value passes through the buffer
_ALIKE_FROM = 8
_IOV_MAX = 1024
_WAKE_BYTES = 256 * 1024
_CRLF = b"\r\n"
_PING = b"PING\r\n"
_STAR = ord("*")

_Head = Callable[[bytearray, int, int], "re.Match[bytes] | None"]
# A head that is here whole and is a plain number, as nearly all are: one match in place of several steps in Python.
_COUNT: _Head = re.compile(rb"\*([0-9]{1,9})\r\n").match
_LENGTH: _Head = re.compile(rb"\$([0-9]{1,9})\r\n").match


class ProtocolError(Exception):
    """The peer does not speak RESP, or beyond the bounds; the connection cannot go on."""


class ConnectionGone(Exception):
    """The peer closed the connection, or it was cut off."""


class Source(Protocol):
    """What a reader needs of a blocking socket."""

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int: ...

    def recvmsg_into(
        self, buffers: Sequence[memoryview], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, object]: ...


class CommandReader:
    """Pulls commands off ``source`` piece by piece: `array_length`, then `arg`, `args`, or `bulk_length` followed by
    `payload_into` or `discard`. Any of them may block, and raises `ProtocolError` or `ConnectionGone`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._args_bytes = 0
        self._tail = bytearray(2)
        self.max_args = MAX_ARGS
        self.received_bytes = 0
        self.set_low_water: Callable[[int], None] | None = None
        """Where set: tells the socket how many bytes must be there before this thread is woken (SO_RCVLOWAT). Saves a
        tenth of the CPU time of receiving values."""

    @property
    def buffered(self) -> bool:
        """Whether bytes of a next command are here already."""
        return self._start < self._end

    def wait(self) -> None:
        """Block until at least one byte is here."""
        if self._start == self._end:
            self._fill()

    def inline_ping(self) -> bool:
        """Take the one inline command there is, ``PING``, if it comes next; health checkers send it."""
        self.wait()
        if self._buffer[self._start] == _STAR:
            return False
        while (have := bytes(self._view[self._start : min(self._end, self._start + len(_PING))])) != _PING:
            if not _PING.startswith(have):
                return False
            self._fill()
        self._start += len(_PING)
        return True

    def array_length(self) -> int:
        """Arguments of the next command, its name included; 0 for an empty command, which has no answer."""
        count = self._head(_COUNT, b"*", "too big mbulk count string")
        if count is None or count > self.max_args:
            raise ProtocolError("invalid multibulk length")
        self._args_bytes = 0
        return max(count, 0)

    def bulk_length(self, limit: int = MAX_BULK_BYTES) -> int:
        """Length of the next argument, whose bytes follow."""
        length = self._head(_LENGTH, b"$", "too big bulk count string")
        if length is None or length < 0 or length > limit:
            raise ProtocolError("invalid bulk length")
        return length

    def arg(self) -> bytes:
        """The next argument, up to ``MAX_ARG_BYTES``."""
        length = self.bulk_length(MAX_ARG_BYTES)
        self._spend(length)
        while self._end - self._start < length + 2:
            self._fill()
        end = self._start + length
        if self._buffer[end : end + 2] != _CRLF:
            raise ProtocolError(f"expected CRLF after {length} bytes of argument")
        value = bytes(self._view[self._start : end])
        self._start = end + 2
        return value

    def args(self, count: int) -> list[bytes]:
        """The next ``count`` arguments."""
        if count < _ALIKE_FROM:
            return [self.arg() for _ in range(count)]
        args: list[bytes] = []
        while len(args) < count:
            missing = count - len(args)
            if missing < _ALIKE_FROM or not self._take_alike(args, count):
                args += [self.arg() for _ in range(min(missing, _ALIKE_FROM))]
        return args

    def payload_into(self, views: list[memoryview]) -> None:
        """Receive a bulk's bytes straight into ``views``, and the CRLF after it."""
        pending = [*views, memoryview(self._tail)]
        for index, view in enumerate(pending):
            taken = self._take_into(view)
            if taken < len(view):
                pending[index] = view[taken:]
                self._receive_all(pending[index:])
                break
        if self._tail != _CRLF:
            raise ProtocolError("expected CRLF after a value")

    def discard(self, length: int) -> None:
        """Skip a bulk's ``length`` bytes and the CRLF after it."""
        left = length + 2
        while left:
            self.wait()
            taken = min(left, self._end - self._start)
            self._start += taken
            left -= taken

    def _head(self, whole: _Head, kind: bytes, too_long: str) -> int | None:
        found = whole(self._buffer, self._start, self._end)
        if found is None:
            return _integer(self._line(kind, too_long)[1:])
        self._start = found.end()
        return int(found[1])

    def _line(self, kind: bytes, too_long: str) -> bytes:
        self.wait()
        first = self._buffer[self._start : self._start + 1]
        if first != kind:
            raise ProtocolError(f"expected '{kind.decode()}', got {_printable(first)}")
        while True:
            at = self._buffer.find(_CRLF, self._start, min(self._end, self._start + MAX_LINE_BYTES))
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start >= MAX_LINE_BYTES:
                raise ProtocolError(too_long)
            self._fill()

    def _take_alike(self, args: list[bytes], count: int) -> bool:
        # Keys mostly come in the same length. All leading arguments in the buffer framed exactly like the first are
        # found by comparing each byte of the frame at that stride, at C speed.
        at = self._buffer.find(_CRLF, self._start, min(self._end, self._start + MAX_LINE_BYTES))
        head = bytes(self._view[self._start : at + 2]) if at >= 0 else b""
        length = _integer(head[1:-2])
        if length is None or not 0 <= length <= MAX_ARG_BYTES or head[:1] != b"$":
            return False
        stride = len(head) + length + 2
        alike = min(count - len(args), (self._end - self._start) // stride)
        for place, byte in [*enumerate(head), (stride - 2, 0x0D), (stride - 1, 0x0A)]:
            column = self._buffer[self._start + place : self._start + alike * stride : stride]
            alike = len(column) - len(column.lstrip(bytes([byte])))
        if not alike:
            return False
        self._spend(length * alike)
        stop = self._start + alike * stride
        args += [arg for (arg,) in struct.iter_unpack(f"{len(head)}x{length}s2x", self._view[self._start : stop])]
        self._start = stop
        return True

    def _spend(self, nbytes: int) -> None:
        self._args_bytes += nbytes
        if self._args_bytes > MAX_ARGS_BYTES:
            raise ProtocolError(f"more than {MAX_ARGS_BYTES} bytes of arguments")

    def _take_into(self, view: memoryview) -> int:
        taken = min(len(view), self._end - self._start)
        view[:taken] = self._view[self._start : self._start + taken]
        self._start += taken
        return taken

    def _receive_all(self, views: list[memoryview]) -> None:
        total = sum(map(len, views))
        if self.set_low_water is not None and total > 2 * _WAKE_BYTES:
            # So much may always still come but for the last piece, which is waited for as usual.
            self.set_low_water(_WAKE_BYTES)
            self._receive(first_bytes(views, total - _WAKE_BYTES))
            self.set_low_water(1)
            views = skip_bytes(views, total - _WAKE_BYTES)
        self._receive(views)

    def _receive(self, views: list[memoryview]) -> None:
        while views:
            try:
                received = self._source.recvmsg_into(views[:_IOV_MAX], 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                raise ConnectionGone(str(error)) from None
            if not received:
                raise ConnectionGone("closed within a value")
            self.received_bytes += received
            views = skip_bytes(views, received)

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._end < _READ_BYTES:
            waiting = bytes(self._view[self._start : self._end])
            self._view[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        try:
            received = self._source.recv_into(self._view[self._end : self._end + _READ_BYTES])
        except OSError as error:
            raise ConnectionGone(str(error)) from None
        if not received:
            raise ConnectionGone("closed by the peer")
        self._end += received
        self.received_bytes += received


def skip_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of ``views`` after their first ``count`` bytes."""
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []


def first_bytes(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first ``count`` bytes of ``views``, or all there are."""
    first = []
    for view in views:
        if not count:
            break
        first.append(view[:count])
        count -= len(first[-1])
    return first


def _integer(digits: bytes) -> int | None:
    negative = digits.startswith(b"-")
    bare = digits[1:] if negative else digits
    if not bare.isdigit() or len(bare) > 18:
        return None
    return -int(bare) if negative else int(bare)


def _printable(byte: bytearray) -> str:
    return repr(byte.decode("ascii", "backslashreplace"))
