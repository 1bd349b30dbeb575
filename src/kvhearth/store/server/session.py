"""What a command sees: the store, and the state of the connection it came in on. No sockets here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvhearth.store.protocol.replies import Replies
from kvhearth.store.protocol.resp import MAX_ARGS, CommandReader
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.loans import Loans
from kvhearth.store.server.tiered import Tiered
from kvhearth.store.server.users import User, Users

UNAUTHENTICATED_ARGS = 10
ANYONE = User("default")


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


class Figures(Protocol):
    """What a server tells of itself when asked."""

    def info(self) -> dict[str, dict[str, str]]:
        """The sections of INFO."""

    def stats(self) -> dict[str, Any]:
        """The object of KV.STATS."""


class Feed(Protocol):
    """Events on a connection. ``fd`` is readable when there are some."""

    fd: int

    def pump(self) -> bool:
        """Write some of what there is to tell; whether there is more. Called too when nothing happened for a while."""

    def close(self) -> None:
        """The connection is ending, or wants no more."""


class Session:
    """One client's connection, as commands see it.

    Args:
        client_id: number of the connection, unique in this server.
        peer: the client's address in words.
        peer_uid: the user at the other end of a unix socket; None on any other.
        users: who may log in; None: nobody has to.
        figures: what INFO and KV.STATS answer.
    """

    def __init__(
        self,
        *,
        client_id: int,
        peer: str,
        peer_uid: int | None = None,
        config: StoreConfig,
        store: Tiered,
        users: Users | None,
        reader: CommandReader,
        replies: Replies,
        figures: Figures,
    ) -> None:
        self.client_id = client_id
        self.peer = peer
        self.peer_uid = peer_uid
        self.config = config
        self.store = store
        self.reader = reader
        self.replies = replies
        self.figures = figures
        self.counts = Counts()
        self.name = ""
        self.library = ""
        self.library_version = ""
        self.closing = False
        self.feed: Feed | None = None
        """Set by a command after which the connection carries events."""
        self.loans: Loans | None = None
        """What the client holds of the store's memory, once it has attached to it."""
        self.users = users
        self.user = ANYONE if users is None else None
        self._users_version = 0
        if self.user is None:
            reader.max_args = UNAUTHENTICATED_ARGS

    @property
    def authenticated(self) -> bool:
        """Whether the client may do anything."""
        return self.user is not None

    def authenticate(self, name: bytes, password: bytes) -> bool:
        """Check a user's password; on success the connection has this user's rights."""
        if self.users is None:
            return True
        version = self.users.version  # from before: a change during the check is then taken in with the next command
        user = self.users.authenticate(name.decode("utf-8", "replace"), password)
        if user is None:
            return False
        self.user, self._users_version = user, version
        self.reader.max_args = MAX_ARGS
        return True

    def refresh_user(self) -> None:
        """Take in what has become of the user since: other rights, or gone."""
        if self.users is None or self.user is None:
            return
        self.users.refresh()
        if self.users.version != self._users_version:
            self.user, self._users_version = self.users.current(self.user), self.users.version

    def may(self, right: str) -> bool:
        """Whether the user has ``right`` (empty: everyone has it)."""
        return not right or (self.user is not None and right in self.user.rights)

    def may_use(self, key: bytes) -> bool:
        """Whether ``key`` is within the user's prefix."""
        return self.user is not None and key.startswith(self.user.prefix)

    def may_use_all(self, keys: Sequence[bytes]) -> bool:
        """Whether each of ``keys`` is."""
        prefix = self.user.prefix if self.user is not None else b""
        return not prefix or all(key.startswith(prefix) for key in keys)

    @property
    def sees_everything(self) -> bool:
        """Whether figures of others' namespaces and groups may be told."""
        return self.user is not None and not self.user.prefix

    @property
    def no_key(self) -> str:
        """Redis's words for a key beyond the user's."""
        return "NOPERM No permissions to access a key"
