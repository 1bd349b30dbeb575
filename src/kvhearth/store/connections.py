"""The client's connections to one store: opened when needed, kept for reuse, never more than a bound."""

from __future__ import annotations

import threading
import time

from kvhearth.store.address import Address
from kvhearth.store.outcomes import Miss, MissReason
from kvhearth.store.wire import WireConnection, encode_command


class Connections:
    """Thread-safe pool.

    Args:
        address: the store.
        password: sent with AUTH on each new connection; None for none.
        limit: connections at once.
    """

    def __init__(self, address: Address, password: str | None, limit: int) -> None:
        self._address = address
        self._password = password
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
        connection = WireConnection(self._address, deadline)
        if self._password is not None:
            try:
                connection.send([encode_command(b"AUTH", self._password.encode())], deadline)
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
