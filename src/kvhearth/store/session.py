"""What a command sees: the table, and the state of the connection it came in on. No sockets here."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhearth.store.config import StoreConfig
from kvhearth.store.replies import Replies
from kvhearth.store.resp import MAX_ARGS, CommandReader
from kvhearth.store.table import Table

UNAUTHENTICATED_ARGS = 10


@dataclass(slots=True)
class Counts:
    """Totals of one connection, or of all closed ones; written by one thread, read by any."""

    commands: dict[tuple[str, str], int] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0

    def count(self, command: str, status: str) -> None:
        """One more command answered."""
        key = (command, status)
        self.commands[key] = self.commands.get(key, 0) + 1

    def add(self, other: Counts) -> None:
        """Take ``other``'s totals in."""
        for key, number in list(other.commands.items()):
            self.commands[key] = self.commands.get(key, 0) + number
        self.hits += other.hits
        self.misses += other.misses
        self.received_bytes += other.received_bytes
        self.sent_bytes += other.sent_bytes


class Session:
    """One client's connection, as commands see it.

    Args:
        client_id: number of the connection, unique in this server.
        peer: the client's address in words.
        info: the server's INFO sections, made when asked for.
    """

    def __init__(
        self,
        *,
        client_id: int,
        peer: str,
        config: StoreConfig,
        table: Table,
        reader: CommandReader,
        replies: Replies,
        info: Callable[[], dict[str, dict[str, str]]],
    ) -> None:
        self.client_id = client_id
        self.peer = peer
        self.config = config
        self.table = table
        self.reader = reader
        self.replies = replies
        self.info = info
        self.counts = Counts()
        self.name = ""
        self.library = ""
        self.library_version = ""
        self.closing = False
        self.authenticated = config.password is None
        if not self.authenticated:
            reader.max_args = UNAUTHENTICATED_ARGS

    def authenticate(self, user: bytes, password: bytes) -> bool:
        """Check the password (the only user is ``default``); on success the connection may do everything."""
        expected = (self.config.password or "").encode()
        if not hmac.compare_digest(password, expected) or user != b"default":
            return False
        self.authenticated = True
        self.reader.max_args = MAX_ARGS
        return True
