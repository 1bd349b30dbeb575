"""Addresses and names as people write them, checked. Opens nothing."""

from __future__ import annotations

import ipaddress
from typing import Any, Literal
from urllib.parse import urlsplit

from kvhearth.errors import UserError

Role = Literal["both", "prefill", "decode"]
"""What an engine does: all of a request, or one half of it."""

Transfer = Literal["store", "nixl"]


_PORTS = {"http": 80, "https": 443}


def says(text: str, *, flag: str = "", restart: bool = False) -> dict[str, Any]:
    """Metadata of a setting: its line of help, its flag where that is not derived from its name, and whether a change
    of it takes effect only with a restart."""
    return {"help": text, "flag": flag, "restart": restart}


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a listener on ``host`` (an address, or the name localhost)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_engine_url(url: str, *, where: str) -> tuple[str, int]:
    """Host and port of an engine's base URL.

    Raises:
        UserError: it is not ``http://host[:port]`` or ``https://host[:port]``, or says more than that.
    """
    remedy = "use http://host:port"
    try:
        parts = urlsplit(url)
        port = _PORTS.get(parts.scheme, 80) if parts.port is None else parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is not a URL ({error})", where=where, remedy=remedy) from None
    if parts.scheme not in _PORTS or not parts.hostname or port == 0:
        raise UserError(f"{url!r} is not an http URL with a host and a port", where=where, remedy=remedy)
    if parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username is not None:
        raise UserError(f"{url!r} has more than host and port", where=where, remedy=remedy)
    return parts.hostname, port


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``host:port`` (``[::1]:8000`` for IPv6).

    Raises:
        UserError: it is something else.
    """
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal():
        raise UserError(f"{listen!r} is not an address", where="listen", remedy="use host:port, as 127.0.0.1:8000")
    return host, int(port)


def check_zmq(url: str, where: str) -> None:
    scheme, slashes, address = url.partition("://")
    if scheme == "ipc" and address.startswith("/"):
        return
    if scheme != "tcp" or not slashes:
        raise UserError(f"{url!r} is not a ZeroMQ address", where=where, remedy="use tcp://host:port or ipc:///path")
    check_host_port(address, where)


def check_host_port(address: str, where: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port[:9]) <= 65535:
        raise UserError(f"{address!r} is not host:port", where=where, remedy="use host:port, as 127.0.0.1:5557")


def check_name(name: str) -> None:
    if not name or not name.isascii() or not name.isprintable() or " " in name:
        raise UserError(
            f"{name!r} cannot name an engine", where="engines", remedy="use printable ASCII without spaces, as engine-0"
        )


def check_positive(group: Any, where: str, *, may_be_zero: tuple[str, ...] = ()) -> None:
    """Every number of a group of settings is above 0, or not below it for those that may be.

    Raises:
        UserError: one is not.
    """
    for name in group.__slots__:
        value = getattr(group, name)
        if not isinstance(value, (int, float)) or value > 0 or (value == 0 and name in may_be_zero):
            continue
        what = "negative" if name in may_be_zero else "not positive"
        raise UserError(f"{value} is {what}", where=f"{where}.{name}", remedy="use a number above 0")
