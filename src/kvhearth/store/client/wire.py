"""The client's end of one connection: sends commands and reads replies, each under a total deadline.

Deadlines are monotonic seconds. Sockets are blocking and the kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO), so that
one call moves a whole row; a connection whose call failed must be closed, as replies may still be under way.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import time
from collections.abc import Sequence

from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.protocol.address import Address, connect
from kvhearth.store.protocol.resp import first_bytes, skip_bytes
from kvhearth.store.protocol.sockets import keep_in_cache
from kvhearth.store.protocol.tls import ClientTls
from kvhearth.store.protocol.tls_socket import TlsSocket

_BUFFER_BYTES = 4096
_FIRST_BYTES = 512
_IOV_MAX = 1024
_REARM_SECONDS = 0.01
# On a unix socket the kernel restarts the clock for each buffer, of at least so many bytes. So each may wait a little
# only, and a send is no longer than as many waits as there is time for.
_UNIX_BUFFER_BYTES = 32 * 1024
_UNIX_WAIT_SECONDS = 0.05


class WireConnection:
    """One connection. Every method raises `Miss` (timeout, unreachable, protocol) and then it is unusable."""

    def __init__(self, address: Address, deadline: float, *, secure: ClientTls | None = None) -> None:
        self._sock: socket.socket | TlsSocket
        try:
            self._sock = connect(address, _seconds_left(deadline))
            keep_in_cache(self._sock)
            if secure is not None:
                self._sock = secure.wrap(self._sock, deadline, host=address.host)
        except TimeoutError:
            raise Miss(MissReason.TIMEOUT, f"connecting to {address}") from None
        except OSError as error:
            raise Miss(MissReason.UNREACHABLE, f"{address}: {error.strerror or error}") from None
        self._unix = address.is_unix
        self._armed_seconds = -math.inf
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._owed = 0
        self.calls = 0
        self.answered = False
        """Whether any byte came back since `begin`."""

    def begin(self) -> None:
        """Start a call on this connection."""
        self.calls += 1
        self.answered = False

    @property
    def clean(self) -> bool:
        """Whether nothing has been received beyond the replies that were read."""
        return self._start == self._end

    def close(self) -> None:
        """Drop the connection."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def send(self, pieces: Sequence[bytes | bytearray | memoryview], deadline: float) -> None:
        """Send all ``pieces``, without copying them."""
        views = [memoryview(piece) for piece in pieces if len(piece)]
        while views:
            self._arm(deadline)
            batch = (first_bytes(views, _unix_limit(deadline)) if self._unix else views)[:_IOV_MAX]
            try:
                sent = self._sock.sendmsg(batch)
            except BlockingIOError:
                continue  # the kernel's clock ran out; `_arm` decides whether ours did
            except OSError as error:
                raise Miss(MissReason.UNREACHABLE, f"sending: {error.strerror or error}") from None
            views = skip_bytes(views, sent)

    def owe(self) -> None:
        """One more reply, of one line, is under way that nobody waits for: it is dropped when it has come."""
        self._owed += 1

    def fileno(self) -> int:
        """The socket's descriptor; negative once closed."""
        return self._sock.fileno()

    def line(self, deadline: float) -> bytes:
        """The next line of a reply, without its CRLF."""
        while self._owed:
            self._line(deadline)
            self._owed -= 1
            self.answered = not self.clean  # that was the answer to a call of before
        return self._line(deadline)

    def _line(self, deadline: float) -> bytes:
        while True:
            at = self._buffer.find(b"\r\n", self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            self._fill(deadline)

    def status(self, deadline: float) -> None:
        """Expect ``+…``."""
        line = self.line(deadline)
        if not line.startswith(b"+"):
            raise unexpected(line)

    def integer(self, deadline: float) -> int:
        """Expect ``:n``."""
        line = self.line(deadline)
        if not line.startswith(b":"):
            raise unexpected(line)
        return digits(line)

    def integer_with_descriptor(self, deadline: float) -> tuple[int, int | None]:
        """Expect ``:n`` that a descriptor comes with, which is the caller's from then on; None without one."""
        fds: list[int] = []
        try:
            number = self._integer_with(fds, deadline)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        for fd in fds[1:]:
            os.close(fd)
        return number, fds[0] if fds else None

    def _integer_with(self, fds: list[int], deadline: float) -> int:
        while self._owed:
            self._line(deadline)
            self._owed -= 1
        while self.clean and isinstance(self._sock, socket.socket):
            self._arm(deadline)
            try:
                data, found, _, _ = socket.recv_fds(self._sock, _FIRST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Miss(MissReason.UNREACHABLE, f"receiving: {error.strerror or error}") from None
            fds += found
            if not data:
                raise Miss(MissReason.UNREACHABLE, "closed by the store")
            self.answered = True
            self._start, self._end = 0, len(data)
            self._view[: len(data)] = data
        return self.integer(deadline)

    def array_length(self, deadline: float) -> int:
        """Expect ``*n``; the elements follow."""
        line = self.line(deadline)
        if not line.startswith(b"*"):
            raise unexpected(line)
        return digits(line)

    def bulk_length(self, deadline: float) -> int | None:
        """Expect ``$n``; None for an absent value. The bytes and a CRLF follow."""
        line = self.line(deadline)
        if not line.startswith(b"$"):
            raise unexpected(line)
        return None if line == b"$-1" else digits(line)

    def read_into(self, views: Sequence[memoryview], deadline: float) -> None:
        """Fill ``views`` in order, received straight into them but for what came along with the last line."""
        left: list[memoryview] = []
        for view in views:
            taken = min(len(view), self._end - self._start)
            view[:taken] = self._view[self._start : self._start + taken]
            self._start += taken
            if taken < len(view):
                left.append(view[taken:])
        while left:
            self._arm(deadline)
            try:
                received = self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Miss(MissReason.UNREACHABLE, f"receiving: {error.strerror or error}") from None
            if not received:
                raise Miss(MissReason.UNREACHABLE, "closed within a reply")
            left = skip_bytes(left, received)

    def skip(self, nbytes: int, deadline: float) -> None:
        """Read ``nbytes`` and drop them."""
        scratch = memoryview(bytearray(min(nbytes, 64 * 1024)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self.read_into([part], deadline)
            nbytes -= len(part)

    def crlf(self, deadline: float) -> None:
        """Expect the CRLF that ends a bulk."""
        if self.line(deadline):
            raise Miss(MissReason.PROTOCOL, "a value is longer than announced")

    def _fill(self, deadline: float) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER_BYTES:
            if self._start == 0:
                raise Miss(MissReason.PROTOCOL, f"a reply line of more than {_BUFFER_BYTES} bytes")
            waiting = bytes(self._view[self._start : self._end])
            self._view[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        while True:
            self._arm(deadline)
            try:
                received = self._sock.recv_into(self._view[self._end :])
            except BlockingIOError:
                continue
            except OSError as error:
                raise Miss(MissReason.UNREACHABLE, f"receiving: {error.strerror or error}") from None
            if not received:
                raise Miss(MissReason.UNREACHABLE, "closed by the store")
            self.answered = True
            self._end += received
            return

    def _arm(self, deadline: float) -> None:
        left = _seconds_left(deadline)
        if abs(left - self._armed_seconds) > _REARM_SECONDS:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(left))
            send_seconds = min(left, _UNIX_WAIT_SECONDS) if self._unix else left
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))
            self._armed_seconds = left


def encode_command(name: bytes, *args: bytes) -> bytes:
    """A command on the wire."""
    head = b"*%d\r\n$%d\r\n%b\r\n" % (len(args) + 1, len(name), name)
    lengths = set(map(len, args))
    if len(lengths) == 1:  # keys mostly come in one length, and by the hundred
        start = b"$%d\r\n" % lengths.pop()
        return b"%b%b%b\r\n" % (head, start, (b"\r\n" + start).join(args))
    return head + b"".join([b"$%d\r\n%b\r\n" % (len(arg), arg) for arg in args])


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise Miss(MissReason.TIMEOUT)
    return left


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), max(1, int(seconds % 1 * 1e6)))


def _unix_limit(deadline: float) -> int:
    return _UNIX_BUFFER_BYTES * max(1, int((deadline - time.monotonic()) / _UNIX_WAIT_SECONDS))


def digits(line: bytes) -> int:
    """The number in a reply line, behind its first byte.

    Raises:
        Miss: it is none.
    """
    if not line[1:].isdigit() or len(line) > 18:
        raise Miss(MissReason.PROTOCOL, f"reply {line[:80]!r}")
    return int(line[1:])


def unexpected(line: bytes) -> Miss:
    """What a reply line says that is not of the kind waited for: an error of the store's, or no RESP."""
    if not line.startswith(b"-"):
        return Miss(MissReason.PROTOCOL, f"reply {line[:80]!r}")
    too_large = line.startswith(b"-ERR string exceeds maximum allowed size")
    return Miss(
        MissReason.TOO_LARGE if too_large else MissReason.REFUSED, line[1:200].decode("utf-8", "backslashreplace")
    )
