"""Writing replies of the Redis protocol, RESP2 or RESP3, gathered and sent without copying values.

Knows the wire form only; what to answer is the commands' business.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvhearth.store.protocol.resp import ConnectionGone, skip_bytes
from kvhearth.store.protocol.tls_socket import TlsSocket

_FLUSH_BYTES = 256 * 1024
_MAX_HELD = 16
_COPY_BELOW_BYTES = 4096
_IOV_MAX = 1024


class Replies:
    """Replies not yet sent on one connection. Bounded: it sends by itself when much has gathered.

    Args:
        sock: the blocking socket to send on.
    """

    def __init__(self, sock: socket.socket | TlsSocket) -> None:
        self._sock = sock
        self._pieces: list[bytearray | memoryview] = []
        self._text = bytearray()
        self._value_bytes = 0
        self._held: list[Callable[[], None]] = []
        self.resp3 = False
        self.errors = 0
        self.sent_bytes = 0

    def ok(self) -> None:
        """``+OK``."""
        self._text += b"+OK\r\n"
        self._flush_if_full()

    def simple(self, word: str) -> None:
        """A one-line status."""
        self._text += b"+%b\r\n" % word.encode()
        self._flush_if_full()

    def error(self, message: str) -> None:
        """An error; ``message`` starts with its code, as in ``ERR syntax error``."""
        self.errors += 1
        line = message.replace("\r", " ").replace("\n", " ")
        self._text += b"-%b\r\n" % line.encode("utf-8", "replace")
        self._flush_if_full()

    def integer(self, value: int) -> None:
        """A whole number."""
        self._text += b":%d\r\n" % value
        self._flush_if_full()

    def integer_with_descriptor(self, value: int, fd: int) -> None:
        """A whole number, and with its first byte a descriptor of this process (unix sockets only).

        Raises:
            ConnectionGone: the peer left, or the connection was cut off.
            ValueError: the connection is under TLS.
        """
        if isinstance(self._sock, TlsSocket):
            raise ValueError("descriptors travel over unix sockets only")
        self.flush()
        text = b":%d\r\n" % value
        try:
            sent = socket.send_fds(self._sock, [text], [fd])
        except OSError as error:
            raise ConnectionGone(str(error)) from None
        self.sent_bytes += sent
        self._text += text[sent:]

    def null(self) -> None:
        """Absence, in the form of the connection's protocol."""
        self._text += b"_\r\n" if self.resp3 else b"$-1\r\n"
        self._flush_if_full()

    def bulk(self, value: bytes | str) -> None:
        """A short string, copied."""
        data = value.encode() if isinstance(value, str) else value
        self._text += b"$%d\r\n%b\r\n" % (len(data), data)
        self._flush_if_full()

    def array(self, length: int) -> None:
        """Head of an array; its elements follow."""
        self._text += b"*%d\r\n" % length

    def push(self, length: int) -> None:
        """Head of a message that answers no command; an array in RESP2."""
        self._text += b">%d\r\n" % length if self.resp3 else b"*%d\r\n" % length

    def map(self, length: int) -> None:
        """Head of a map of ``length`` pairs: a map in RESP3, a flat array in RESP2."""
        self._text += b"%%%d\r\n" % length if self.resp3 else b"*%d\r\n" % (2 * length)

    def value(self, views: list[memoryview], nbytes: int, release: Callable[[], None]) -> None:
        """A value from the pool; ``release`` is called once its bytes are out (or will never be needed)."""
        self._text += b"$%d\r\n" % nbytes
        if nbytes < _COPY_BELOW_BYTES:
            for view in views:
                self._text += view
            release()
        else:
            self._pieces += [self._text, *views]
            self._text = bytearray()
            self._value_bytes += nbytes
            self._held.append(release)
        self._text += b"\r\n"
        self._flush_if_full()

    def flush(self) -> None:
        """Send all that has gathered.

        Raises:
            ConnectionGone: the peer left, or the connection was cut off.
        """
        try:
            if not self._pieces:
                text, self._text = self._text, bytearray()
                self._sock.sendall(text)
                self.sent_bytes += len(text)
            else:
                self._send_gathered()
        except OSError as error:
            raise ConnectionGone(str(error)) from None
        finally:
            self.drop()

    def drop(self) -> None:
        """Forget what has gathered, and release the values in it."""
        held, self._held = self._held, []
        self._pieces, self._text, self._value_bytes = [], bytearray(), 0
        for release in held:
            release()

    @property
    def waiting(self) -> bool:
        """Whether anything has gathered."""
        return bool(self._text or self._pieces)

    def _flush_if_full(self) -> None:
        if len(self._text) + self._value_bytes >= _FLUSH_BYTES or len(self._held) >= _MAX_HELD:
            self.flush()

    def _send_gathered(self) -> None:
        views = [memoryview(piece) for piece in [*self._pieces, self._text]]
        while views:
            sent = self._sock.sendmsg(views[:_IOV_MAX])
            self.sent_bytes += sent
            views = skip_bytes(views, sent)
