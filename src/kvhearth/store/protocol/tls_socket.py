"""A TCP socket under TLS with the calls of a plain one that this room makes, and the same behaviour under time limits.

The handshake is `tls`'s.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Buffer

_REARM_SECONDS = 0.01
_JOIN_BELOW_BYTES = 16 * 1024  # a TLS record carries so much; smaller pieces share one
_SEND_BYTES = 256 * 1024


class TlsError(OSError):
    """The handshake failed, or the connection broke in TLS; ``strerror`` says why in words for an operator."""


class TlsSocket:
    """A socket after the handshake, with the calls of a blocking `socket.socket` that this room makes.

    Time limits set with SO_RCVTIMEO and SO_SNDTIMEO hold for each call in all, as they do on a plain socket: a call
    that ends by them raises BlockingIOError, or returns what it has moved. One thread at a time may use it; only
    `shutdown` may come from another. A peer that leaves without TLS's farewell is taken as one that closed: every
    message of the protocol carries its length, so a cut one cannot pass for a whole one.
    """

    def __init__(self, wrapped: ssl.SSLSocket) -> None:
        self._ssl = wrapped
        self._receive_seconds: float | None = None
        self._send_seconds: float | None = None
        self._armed_seconds: float | None = None
        wrapped.settimeout(None)

    @property
    def family(self) -> int:
        """Address family."""
        return self._ssl.family

    def recv(self, nbytes: int, flags: int = 0, /) -> bytes:
        """Up to ``nbytes``."""
        buffer = bytearray(nbytes)
        return bytes(buffer[: self.recv_into(memoryview(buffer), 0, flags)])

    def recv_into(self, buffer: Buffer, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive what is there into ``buffer``; with MSG_WAITALL, until it is full, closed, or out of time."""
        view = memoryview(buffer).cast("B")
        return self._receive([view[:nbytes] if nbytes else view], flags)

    def recvmsg_into(
        self, buffers: Iterable[Buffer], ancbufsize: int = 0, flags: int = 0, /
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        """Like `recv_into`, over several buffers in order; there is never ancillary data."""
        return self._receive([memoryview(buffer).cast("B") for buffer in buffers], flags), [], 0, None

    def send(self, data: Buffer, flags: int = 0, /) -> int:
        """Send ``data``; how much of it went out."""
        return self.sendmsg([data])

    def sendall(self, data: Buffer, flags: int = 0, /) -> None:
        """Send all of ``data``."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self.sendmsg([view]) :]

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        """Send ``buffers`` in order; how many bytes went out: all, unless time ran out. After BlockingIOError the same
        bytes must come first in the next call."""
        give_up = _give_up(self._send_seconds)
        sent = 0
        for piece in _records(buffers):
            try:
                self._limit(give_up)
                sent += self._ssl.send(piece)
            except (TimeoutError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                if sent:
                    return sent
                raise BlockingIOError(errno.EAGAIN, "timed out") from None
            except ssl.SSLError as error:
                raise tls_error(error) from None
        return sent

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """Set an option; the two time limits are kept here, as TLS would try again past them."""
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            if isinstance(value, int):
                raise TypeError("a time limit is a struct timeval")
            seconds, micros = struct.unpack("ll", value)
            limit = seconds + micros / 1e6 or None
            if option == socket.SO_RCVTIMEO:
                self._receive_seconds = limit
            else:
                self._send_seconds = limit
        else:
            self._ssl.setsockopt(level, option, value)

    def settimeout(self, seconds: float | None) -> None:
        """Limit each receive and each send."""
        self._receive_seconds = self._send_seconds = seconds

    def getsockopt(self, level: int, option: int, length: int = 0, /) -> int | bytes:
        """As on a plain socket."""
        return self._ssl.getsockopt(level, option, length) if length else self._ssl.getsockopt(level, option)

    def getpeername(self) -> Any:
        """Address of the other side."""
        return self._ssl.getpeername()

    def fileno(self) -> int:
        """Descriptor, for waiting on; bytes may have been read ahead of it."""
        return self._ssl.fileno()

    def shutdown(self, how: int, /) -> None:
        """Shut the TCP connection; a call that another thread waits in returns."""
        socket.socket.shutdown(self._ssl, how)  # SSLSocket's own would go on in plain text for the other direction

    def close(self) -> None:
        """Close it."""
        self._ssl.close()

    def _receive(self, views: list[memoryview], flags: int) -> int:
        give_up = _give_up(self._receive_seconds)
        received = 0
        for view in views:
            filled = 0
            while filled < len(view):
                try:
                    self._limit(give_up)
                    got = self._ssl.recv_into(view[filled:])
                except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    if received:
                        return received
                    raise BlockingIOError(errno.EAGAIN, "timed out") from None
                except ssl.SSLError as error:
                    raise tls_error(error) from None
                filled += got
                received += got
                if not got or not flags & socket.MSG_WAITALL:
                    return received
        return received

    def _limit(self, give_up: float | None) -> None:
        """Give the next call what is left until ``give_up``; a system call, so only when it changed noticeably."""
        left = None if give_up is None else give_up - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        armed = self._armed_seconds
        if left is None or armed is None:
            if left is not armed:
                self._ssl.settimeout(left)
        elif abs(left - armed) > _REARM_SECONDS:
            self._ssl.settimeout(left)
        else:
            return
        self._armed_seconds = left


def tls_error(error: ssl.SSLError) -> TlsError:
    """``error`` in words for an operator."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(errno.EPROTO, f"TLS: the other side's certificate: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError):
        return TlsError(errno.ECONNRESET, "TLS: the other side left")
    reason = (error.reason or error.strerror or "failed").replace("_", " ").lower()
    return TlsError(errno.EPROTO, f"TLS: {reason}")


def _give_up(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


def _records(buffers: Iterable[Buffer]) -> Iterable[memoryview | bytearray]:
    """The bytes of ``buffers`` in order, as pieces worth a call each. When some did not go out and are given again, the
    first piece is no shorter than it was: OpenSSL has encrypted it already."""
    joined = bytearray()
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if len(view) + len(joined) <= _JOIN_BELOW_BYTES:
            joined += view
            continue
        if joined:
            yield joined
            joined = bytearray()
        for start in range(0, len(view), _SEND_BYTES):
            yield view[start : start + _SEND_BYTES]
    if joined:
        yield joined
