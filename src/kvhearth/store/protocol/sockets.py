"""How sockets that carry whole values are set, at both ends. Opening and listening is the business of `address`."""

from __future__ import annotations

import contextlib
import socket

_LOCAL_SEND_BYTES = 128 * 1024


def is_local_tcp(sock: socket.socket) -> bool:
    """Whether a TCP socket is connected, and to a peer on this machine, as far as addresses tell."""
    with contextlib.suppress(OSError):  # the peer is gone; whoever uses the socket will find out
        return sock.family != socket.AF_UNIX and sock.getsockname()[0] == sock.getpeername()[0]
    return False


def keep_in_cache(sock: socket.socket) -> None:
    """Keep what a connected TCP socket may have under way small if its peer is on this machine.

    The kernel would let megabytes gather between a sender and a receiver that share a cache; by the time the receiver
    copies them they are out of it. On two cores that costs half of the speed or more for values of 2 and of 16 MiB.
    Over a network the buffer has to cover bandwidth times round trip, and is the kernel's to size.
    """
    if is_local_tcp(sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
