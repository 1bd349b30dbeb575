"""TCP ports for children: taken before anything starts and kept over their restarts. Nothing listens here."""

from __future__ import annotations

import errno
import socket
from types import TracebackType
from typing import Self

from kvhearth.errors import UserError


class PortKeeper:
    """Holds ports so that nothing else on the machine is given them, while children of ours may listen there.

    A socket that is bound with SO_REUSEADDR and does not listen lets another with SO_REUSEADDR bind and listen on the
    same port (Linux; every server of ours sets it), yet keeps the kernel from handing the port to anyone who asks for a
    free one. So a port survives the death of its child, and a connection meanwhile is refused at once.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str, port: int, *, where: str) -> int:
        """Take a port (0: any free one) and return it.

        Raises:
            UserError: it is in use, not ours to bind, or the host is not an address of this machine; ``where`` names
                the field that asked for it.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, port))
        except OSError as error:
            held.close()
            raise _cannot_bind(host, port, where, error) from error
        self._held.append(held)
        return int(held.getsockname()[1])

    def close(self) -> None:
        """Let go of all ports."""
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _cannot_bind(host: str, port: int, where: str, error: OSError) -> UserError:
    if error.errno == errno.EADDRINUSE:
        what, remedy = (
            f"port {port} on {host} is in use",
            "stop what listens there, or set another port (0 picks a free one)",
        )
    elif error.errno == errno.EACCES:
        what, remedy = f"port {port} may not be bound by this user", "set a port of 1024 or more"
    else:
        what, remedy = (
            f"cannot listen at {host}:{port}: {error.strerror}",
            "set an address of this machine, such as 127.0.0.1",
        )
    return UserError(what, where=where, remedy=remedy)
