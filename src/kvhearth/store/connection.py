"""One client's connection and its thread: reads commands, answers them, and can be cut off from outside."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable

from kvhearth.store import commands
from kvhearth.store.config import StoreConfig
from kvhearth.store.replies import Replies
from kvhearth.store.resp import CommandReader, ConnectionGone, ProtocolError
from kvhearth.store.session import Session
from kvhearth.store.table import Table


class Connection:
    """A connected client.

    The socket is blocking and has no timeouts of its own, so that one call moves a whole value. Instead ``deadline``
    says until when the current wait may last, and the server's watchdog cuts connections that are past it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        client_id: int,
        peer: str,
        config: StoreConfig,
        table: Table,
        info: Callable[[], dict[str, dict[str, str]]],
    ) -> None:
        self._sock = sock
        self._config = config
        self._idle = True
        self.deadline = math.inf
        self.cut_reason = ""
        self._reader = CommandReader(sock)
        self._replies = Replies(sock)
        self.session = Session(
            client_id=client_id,
            peer=peer,
            config=config,
            table=table,
            reader=self._reader,
            replies=self._replies,
            info=info,
        )

    def serve(self) -> None:
        """Answer commands until the client leaves, quits, breaks the protocol or is cut off."""
        try:
            while not self.session.closing:
                self._serve_one()
            self._replies.flush()
        except ProtocolError as error:
            self.cut_reason = self.cut_reason or "protocol"
            self._say_goodbye(f"ERR Protocol error: {error}")
        except ConnectionGone:
            pass
        finally:
            self._replies.drop()
            self._count_bytes()
            self._sock.close()

    def cut(self, reason: str) -> None:
        """End the connection from another thread; whatever its own thread waits for returns at once."""
        self.cut_reason = self.cut_reason or reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def overdue(self, now: float) -> str | None:
        """Why this connection should be cut at ``now`` (monotonic seconds), or None."""
        if now < self.deadline:
            return None
        return "idle" if self._idle else "stalled"

    def _serve_one(self) -> None:
        if not self._reader.buffered:
            self._await_command()
        self.deadline = time.monotonic() + self._config.stall_timeout_seconds
        self._idle = False
        if self._reader.inline_ping():
            self._answer_ping()
            return
        count = self._reader.array_length()
        if not count:
            return
        errors = self._replies.errors
        name = commands.run(self.session, count)
        self.session.counts.count(name, "ok" if self._replies.errors == errors else "error")

    def _answer_ping(self) -> None:
        if self.session.authenticated:
            self._replies.simple("PONG")
        else:
            self._replies.error(commands.NOAUTH)
        self.session.counts.count("ping", "ok" if self.session.authenticated else "error")

    def _await_command(self) -> None:
        if self._replies.waiting:
            self._replies.flush()
        self._count_bytes()
        self.deadline = time.monotonic() + self._config.idle_timeout_seconds
        self._idle = True
        self._reader.wait()

    def _count_bytes(self) -> None:
        self.session.counts.received_bytes = self._reader.received_bytes
        self.session.counts.sent_bytes = self._replies.sent_bytes

    def _say_goodbye(self, message: str) -> None:
        self._replies.error(message)
        with contextlib.suppress(ConnectionGone, OSError):
            self._replies.flush()
            linger(self._sock)


def linger(sock: socket.socket) -> None:
    """Let the peer read a last reply: closing with unread input would reset the connection and lose it.

    Raises:
        OSError: the peer is gone, or still sends after a second's grace.
    """
    sock.shutdown(socket.SHUT_WR)
    give_up = time.monotonic() + 1.0
    scratch = bytearray(16 * 1024)
    while (left := give_up - time.monotonic()) > 0:
        sock.settimeout(left)
        if not sock.recv_into(scratch):
            return
