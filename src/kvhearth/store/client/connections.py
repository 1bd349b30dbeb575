"""The client's connections to one store: opened when needed, kept for reuse, never more than a bound."""

from __future__ import annotations

import threading
import time

from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import Address
from kvhearth.store.protocol.limits import DEFAULT_USER
from kvhearth.store.protocol.tls import ClientTls


class Connections:
    """Thread-safe pool.

    Args:
        address: the store.
        limit: connections at once.
        login: user and password, sent with AUTH on each new connection; None for none.
        secure: TLS; None for none.
    """

    def __init__(
        self,
        address: Address,
        limit: int,
        *,
        login: tuple[str, str] | None = None,
        secure: ClientTls | None = None,
    ) -> None:
        self._address = address
        self._login = login
        self._secure = secure
        self._limit = limit
        self._condition = threading.Condition()
        self._idle: list[WireConnection] = []
        self._open = 0
        self._closed = False

    def take(self, deadline: float, *, fresh: bool = False) -> WireConnection:
        """A connection for one call; it must come back through `give_back` or `discard`.

        Args:
            deadline: until when to wait for one, and for a new one to be set up (monotonic seconds).
            fresh: not one used before; those that idle are dropped, as the store seems to have restarted.

        Raises:
            Miss: busy, timeout, unreachable, or refused (wrong password).
        """
        with self._condition:
            if fresh:
                self._drop_idle()
            while not self._idle and self._open >= self._limit:
                left = deadline - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    raise Miss(MissReason.BUSY, f"all {self._limit} connections are in use")
            if self._closed:
                raise Miss(MissReason.UNREACHABLE, "the client is closed")
            if self._idle:
                return self._idle.pop()
            self._open += 1
        try:
            return self._connect(deadline)
        except BaseException:
            self._forget_one()
            raise

    def give_back(self, connection: WireConnection) -> None:
        """The call is over and its replies were read to the end."""
        with self._condition:
            if not self._closed:
                self._idle.append(connection)
                self._condition.notify()
                return
        self.discard(connection)

    def discard(self, connection: WireConnection) -> None:
        """The call failed half way: close the connection."""
        connection.close()
        self._forget_one()

    def close(self) -> None:
        """Close the idle connections now, the others as they come back."""
        with self._condition:
            self._closed = True
            self._drop_idle()
            self._condition.notify_all()

    def _connect(self, deadline: float) -> WireConnection:
        connection = WireConnection(self._address, deadline, secure=self._secure)
        if self._login is not None:
            try:
                connection.send([encode_command(b"AUTH", *_credentials(*self._login))], deadline)
                connection.status(deadline)
            except BaseException:
                connection.close()
                raise
        return connection

    def _forget_one(self) -> None:
        with self._condition:
            self._open -= 1
            self._condition.notify()

    def _drop_idle(self) -> None:
        for connection in self._idle:
            connection.close()
        self._open -= len(self._idle)
        self._idle.clear()


def _credentials(user: str, password: str) -> list[bytes]:
    # A Redis of before version 6 knows no users.
    return [password.encode()] if user == DEFAULT_USER else [user.encode(), password.encode()]
