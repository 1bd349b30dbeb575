"""Addresses of a store: TCP (``host:port``) and unix sockets (``unix:/path``); listening on them and connecting."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.errors import UserError

_UNIX_PATH_BYTES = 99  # 107 less the suffix under which a listener first binds
_BACKLOG = 128
_TCP = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^:\[\]/\s]+):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """A TCP host and port, or (``path`` set) a unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        """Whether this is a unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. Names other than ``localhost`` count as reachable from outside."""
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, where: str = "address") -> Address:
    """Read ``host:port``, ``[v6]:port``, ``unix:/path`` or ``/path``.

    Raises:
        UserError: none of these, a port beyond 65535, or a path too long for a socket.
    """
    if text.startswith(("unix:", "/")):
        path = text.removeprefix("unix:")
        if not path or len(os.fsencode(path)) > _UNIX_PATH_BYTES:
            raise UserError(
                f"{text!r}: a socket path has 1 to {_UNIX_PATH_BYTES} bytes",
                where=where,
                remedy="choose a shorter path",
            )
        return Address(path=path)
    match = _TCP.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise UserError(f"{text!r} is not an address", where=where, remedy="write host:port or unix:/path")
    return Address(host=match["host"].strip("[]"), port=int(match["port"]))


def connect(address: Address, timeout_seconds: float) -> socket.socket:
    """A blocking connected socket.

    Raises:
        OSError: refused, unreachable, unknown host, or (TimeoutError) not within ``timeout_seconds`` in all.
    """
    give_up = time.monotonic() + timeout_seconds
    if address.is_unix:
        return _connect_one(socket.AF_UNIX, address.path, give_up)
    failure: OSError | None = None
    for family, target in _resolve(address, timeout_seconds):
        try:
            sock = _connect_one(family, target, give_up)
        except TimeoutError:
            raise
        except OSError as error:
            failure = error
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise failure or OSError(errno.EADDRNOTAVAIL, "no address")


def _connect_one(family: int, target: Any, give_up: float) -> socket.socket:
    left = give_up - time.monotonic()
    if left <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "timed out")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(left)
        sock.connect(target)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve(address: Address, timeout_seconds: float) -> list[tuple[int, Any]]:
    found: list[list[tuple[int, Any]] | OSError] = []

    def look() -> None:
        try:
            answers = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            found.append([(answer[0], answer[4]) for answer in answers])
        except OSError as error:
            found.append(error)

    if _is_numeric(address.host):
        look()
    else:  # a name server may take half a minute to fail, and getaddrinfo knows no deadline
        thread = threading.Thread(target=look, name="kvhearth-store-resolve", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
    if not found:
        raise TimeoutError(errno.ETIMEDOUT, f"looking up {address.host} timed out")
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Listener:
    """A bound socket; `open` lets clients in, `close` ends it and removes its socket file.

    Args:
        address: where; port 0 takes any free port.
        where: field that named the address, for errors.

    Raises:
        UserError: the address is taken or cannot be used.
    """

    def __init__(self, address: Address, *, where: str) -> None:
        self._where = where
        self._inode: tuple[int, int] | None = None
        try:
            self.sock = self._bind_unix(address) if address.is_unix else self._bind_tcp(address)
        except OSError as error:
            raise self._refusal(address, error) from None
        if not address.is_unix:
            address = address._replace(port=self.sock.getsockname()[1])
        self.address = address

    def open(self) -> None:
        """Start to take connections."""
        self.sock.listen(_BACKLOG)
        if self.address.is_unix:
            # The file gets its final name only now that it is private and answers: no window for anyone.
            os.rename(self._temporary, self.address.path)

    def close(self) -> None:
        """Stop taking connections; wakes a blocked accept."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self.address.is_unix:
            for path in (self._temporary, self.address.path):
                with contextlib.suppress(OSError):
                    found = os.stat(path)
                    if (found.st_dev, found.st_ino) == self._inode:
                        os.unlink(path)

    def _bind_tcp(self, address: Address) -> socket.socket:
        family, kind, proto, _, target = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
        except BaseException:
            sock.close()
            raise
        return sock

    def _bind_unix(self, address: Address) -> socket.socket:
        self._refuse_live_socket(address)
        self._temporary = f"{address.path}.{os.getpid()}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)
            sock.bind(self._temporary)
            os.chmod(self._temporary, 0o600)
            found = os.stat(self._temporary)
        except BaseException:
            sock.close()
            raise
        self._inode = (found.st_dev, found.st_ino)
        return sock

    def _refuse_live_socket(self, address: Address) -> None:
        try:
            mode = os.stat(address.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise UserError(
                f"{address.path} exists and is not a socket",
                where=self._where,
                remedy="choose another path or remove it",
            )
        try:
            connect(address, 1.0).close()
        except ConnectionRefusedError:
            return  # left behind by a dead server; `open` replaces it
        raise OSError(errno.EADDRINUSE, "a server answers there")

    def _refusal(self, address: Address, error: OSError) -> UserError:
        if error.errno == errno.EADDRINUSE:
            return UserError(
                f"{address} is already in use",
                where=self._where,
                remedy="stop the process that has it or choose another",
            )
        if address.is_unix and error.errno == errno.ENOENT:
            return UserError(f"{Path(address.path).parent} does not exist", where=self._where, remedy="create it first")
        return UserError(
            f"cannot listen on {address}: {error.strerror}", where=self._where, remedy="choose another address"
        )
