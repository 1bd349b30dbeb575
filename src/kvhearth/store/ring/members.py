"""Where the nodes of a ring come from: a list, a file or DNS, the last two re-read live. Opens no connection to a node.

What cannot be read, or makes no sense, changes nothing: the last good members stay, and one log line says so.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.store.protocol.address import Address, parse_address

MAX_NODES = 256
FILE_SECONDS = 1.0
DNS_SECONDS = 5.0

_MAX_FILE_BYTES = 128 * 1024
_DNS = re.compile(r"dns:(?P<name>[A-Za-z0-9._-]{1,253}):(?P<port>[0-9]{1,5})")
_log = logging.getLogger(__name__)

Look = Callable[[float], tuple[str, ...]]
"""Finds the nodes within so many seconds; raises UserError or OSError when it cannot."""


class Members:
    """The nodes of a ring as last known. Not thread-safe: one thread refreshes.

    Args:
        text: ``a:7420,b:7420`` (also ``unix:/path``), ``file:/path`` (a node a line, ``#`` begins a comment) or
            ``dns:name:7420`` (every A and AAAA record: their addresses are the nodes' names).
        where: the field that ``text`` was given in, for errors.

    Raises:
        UserError: a part is no address or named twice, there are none or more than ``MAX_NODES``, or the file cannot
            be read. A name that does not resolve now is no error: it may later.
    """

    def __init__(self, text: str, *, where: str = "address") -> None:
        self.nodes: tuple[str, ...] = ()
        self.interval_seconds = math.inf
        """How often to `refresh`; infinite for a list, which stays as it is."""
        self._text = text
        self._failing = False
        self._look: Look | None = None
        if text.startswith("file:/"):
            path = Path(text.removeprefix("file:"))
            self._look, self.interval_seconds = (lambda _seconds: _read_file(path)), FILE_SECONDS
            self.nodes = _read_at_start(path, where)
        elif (dns := _DNS.fullmatch(text)) is not None:
            address = parse_address(f"{dns['name']}:{dns['port']}", where=where)
            self._look, self.interval_seconds = _Lookup(address.host, address.port).look, DNS_SECONDS
        else:
            self.nodes = _checked(((part, where) for part in text.split(",")), where)

    @property
    def is_live(self) -> bool:
        """Whether the nodes may change."""
        return self._look is not None

    def refresh(self, timeout_seconds: float) -> bool:
        """Look again, for at most so long; True when the nodes changed. Never raises."""
        if self._look is None:
            return False
        try:
            found = self._look(timeout_seconds)
        except (UserError, OSError) as error:
            if not self._failing:
                kept = f"the last {len(self.nodes)} known stay" if self.nodes else "there are none yet"
                _log.warning("nodes of %s cannot be told: %s; %s", self._text, error, kept)
            self._failing = True
            return False
        if self._failing:
            _log.info("nodes of %s are known again: %d", self._text, len(found))
        self._failing = False
        changed = set(found) != set(self.nodes)
        self.nodes = found
        return changed


def _checked(parts: Iterable[tuple[str, str]], where: str) -> tuple[str, ...]:
    """The nodes of (text, where it was found), each as `Address` writes it."""
    nodes: dict[str, None] = {}
    for text, place in parts:
        name = str(parse_address(text.strip(), where=place))
        if name in nodes:
            raise UserError(f"{name} is named twice", where=place, remedy="name every node once")
        nodes[name] = None
        if len(nodes) > MAX_NODES:
            raise UserError(f"more than {MAX_NODES} nodes", where=where, remedy="build several rings")
    if not nodes:
        raise UserError("no node", where=where, remedy="name at least one, as host:port")
    return tuple(nodes)


def _read_file(path: Path) -> tuple[str, ...]:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE_BYTES + 1)
    if len(data) > _MAX_FILE_BYTES:
        raise UserError(f"more than {_MAX_FILE_BYTES} bytes", where=str(path), remedy="write a node a line")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError:
        raise UserError("not a text file", where=str(path), remedy="write a node a line") from None
    stripped = [(line.partition("#")[0].strip(), f"{path}:{number}") for number, line in enumerate(lines, 1)]
    return _checked((part for part in stripped if part[0]), str(path))


def _read_at_start(path: Path, where: str) -> tuple[str, ...]:
    try:
        return _read_file(path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"file:{path}: {reason}", where=where, remedy="name a file with a node a line") from None


class _Lookup:
    """Asks the resolver on a thread, as getaddrinfo knows no deadline. One that does not answer holds up one thread:
    the next look waits for the same question."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._thread: threading.Thread | None = None
        self._found: list[tuple[str, ...] | OSError] = []

    def look(self, seconds: float) -> tuple[str, ...]:
        if self._thread is None:
            self._found = []
            self._thread = threading.Thread(target=self._ask, name="kvhearth-store-members", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"looking up {self._host} takes long")
        self._thread = None
        found = self._found[0]
        if isinstance(found, OSError):
            raise found
        return _checked(((name, self._host) for name in found), self._host)

    def _ask(self) -> None:
        try:
            answers = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            hosts = {str(answer[4][0]) for answer in answers}
            self._found.append(tuple(str(Address(host, self._port)) for host in sorted(hosts)))
        except OSError as error:
            self._found.append(error)
        except Exception as error:  # a name that cannot be encoded, say
            self._found.append(OSError(str(error)))
