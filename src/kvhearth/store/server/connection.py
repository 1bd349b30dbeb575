"""One client's connection and its thread: reads commands, answers them, and can be cut off from outside."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from functools import partial

from kvhearth.store.protocol.replies import Replies
from kvhearth.store.protocol.resp import CommandReader, ConnectionGone, ProtocolError
from kvhearth.store.protocol.sockets import is_local_tcp, keep_in_cache
from kvhearth.store.protocol.tls_socket import TlsSocket
from kvhearth.store.server import commands
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.session import Feed, Figures, Session
from kvhearth.store.server.tiered import Tiered
from kvhearth.store.server.users import Users

_FEED_SECONDS = 1.0
_LOGIN_SECONDS = 10.0


class Connection:
    """A connected client.

    The socket is blocking and has no timeouts of its own, so that one call moves a whole value. Instead ``deadline``
    says until when the current wait may last, and the server's watchdog cuts connections that are past it.
    """

    def __init__(
        self,
        sock: socket.socket | TlsSocket,
        *,
        client_id: int,
        peer: str,
        config: StoreConfig,
        store: Tiered,
        users: Users | None,
        figures: Figures,
    ) -> None:
        self._sock = sock
        self._config = config
        self._idle = True
        self.deadline = math.inf
        self.cut_reason = ""
        self._reader = CommandReader(sock)
        if isinstance(sock, socket.socket) and is_local_tcp(sock):  # not one under TLS
            keep_in_cache(sock)
            self._reader.set_low_water = partial(sock.setsockopt, socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self._replies = Replies(sock)
        self.session = Session(
            client_id=client_id,
            peer=peer,
            peer_uid=peer_uid(sock),
            config=config,
            store=store,
            users=users,
            reader=self._reader,
            replies=self._replies,
            figures=figures,
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
            if self.session.feed is not None:
                self.session.feed.close()
            self._replies.drop()
            if self.session.loans is not None:
                self.session.loans.close()
            self._count_bytes()
            self._sock.close()

    def cut(self, reason: str) -> None:
        """End the connection from another thread; whatever its own thread waits for returns at once."""
        self.cut_reason = self.cut_reason or reason
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def overdue(self, now: float) -> str | None:
        """Why this connection should be cut at ``now`` (monotonic seconds), or None."""
        if self.session.loans is not None and self.session.loans.overdue(now):
            return "lease"
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
        while self.session.feed is not None and not self._carry(self.session.feed):
            pass
        idle = self._config.idle_timeout_seconds
        # Who has not logged in takes a connection from those who have.
        self.deadline = time.monotonic() + (idle if self.session.authenticated else min(idle, _LOGIN_SECONDS))
        self._idle = True
        self._reader.wait()

    def _carry(self, feed: Feed) -> bool:
        """Send what the feed has to tell, then wait for more; True once the client says something."""
        self.deadline = time.monotonic() + self._config.stall_timeout_seconds
        more = feed.pump()
        if self._replies.waiting:
            self._replies.flush()
        self.deadline = math.inf
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(feed.fd, select.POLLIN)
        ready = poll.poll(0 if more else _FEED_SECONDS * 1000)
        return any(fd != feed.fd for fd, _ in ready)

    def _count_bytes(self) -> None:
        self.session.counts.received_bytes = self._reader.received_bytes
        self.session.counts.sent_bytes = self._replies.sent_bytes

    def _say_goodbye(self, message: str) -> None:
        self._replies.error(message)
        with contextlib.suppress(ConnectionGone, OSError):
            self._replies.flush()
            linger(self._sock)


def peer_uid(sock: socket.socket | TlsSocket) -> int | None:
    """The user at the other end of a unix socket, as of when it connected; None on any other."""
    if isinstance(sock, TlsSocket) or sock.family != socket.AF_UNIX:
        return None
    credentials = struct.Struct("3i")  # struct ucred: pid, uid, gid
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(raw)[1])


def linger(sock: socket.socket | TlsSocket) -> None:
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
