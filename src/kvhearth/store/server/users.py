"""Who may use a store: users, their rights, and the check of their passwords. Not what each command needs.

The users file has one user a line; blank lines and lines that start with ``#`` are left alone::

    name:hash:rights:prefix

    engines:$scrypt$ln=14,r=8,p=1$<salt>$<hash>:read,write:
    team-a:$scrypt$ln=14,r=8,p=1$<salt>$<hash>:read:0f3a9c

- ``name``: 1 to 64 letters, digits, ``_``, ``.``, ``@`` or ``-``. ``AUTH <password>`` alone means the user ``default``.
- ``hash``: scrypt (RFC 7914) in PHC string form: ln is log2 of the cost N; salt and hash in base64 without padding.
- ``rights``: of ``read``, ``write``, ``admin``, with commas between. None contains another.
- ``prefix``: to the end of the line, empty for none. The user sees only keys that begin with it. Not with ``admin``,
  which concerns every key.

`passwords` makes the lines. Only the file's owner and group may be able to read it.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store_safety as m
from kvhearth.store.protocol.limits import DEFAULT_USER
from kvhearth.store.server.passwords import Hash, decoy_hash, parse_hash

_log = logging.getLogger(__name__)

RIGHTS = ("read", "write", "admin")
MAX_USERS = 1000
MAX_FILE_BYTES = 2**20
MAX_PREFIX_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_LOOK_AGAIN_SECONDS = 1.0
_CHECKS_AT_ONCE = 2  # scrypt takes 16 MiB and some 40 ms of a core each
_WAIT_SECONDS = 2.0
_PENALTY_SECONDS = 0.2
_LOG_EVERY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class User:
    """Someone who has logged in.

    Args:
        name: as in the users file.
        rights: of `RIGHTS`.
        prefix: what every key of this user begins with; empty for any.
    """

    name: str
    rights: frozenset[str] = frozenset(RIGHTS)
    prefix: bytes = b""
    secret_id: bytes = field(default=b"", repr=False)
    """Changes with the password."""

    def may(self, right: str, key: bytes | None = None) -> bool:
        """Whether this user has ``right``, on ``key`` if one is given."""
        return right in self.rights and (key is None or key.startswith(self.prefix))


class Entry:
    """One line of a users file: a user and the hash of the password."""

    __slots__ = ("hash", "user")

    def __init__(self, user: User, hash_: Hash) -> None:
        self.user = user
        self.hash = hash_


class Users:
    """Everyone who may log in. Thread-safe.

    The rate of guessing is bounded without remembering who guesses: a wrong password costs its connection a pause, and
    only so many passwords are hashed at once. Once a password was right its keyed digest is kept in memory, so that an
    engine that reconnects costs nothing.
    """

    def __init__(self, entries: dict[str, Entry], *, password: str | None = None, file: Path | None = None) -> None:
        self._entries = entries
        self._password = password
        self._file = file
        self._seen = _stamp(file)
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        self._lock = threading.Lock()
        self._checks = threading.BoundedSemaphore(_CHECKS_AT_ONCE)
        self._digest_key = secrets.token_bytes(32)
        self._known: dict[str, tuple[bytes, bytes]] = {}
        self._logins = {"ok": 0, "wrong": 0, "busy": 0}
        self._log_at = 0.0
        self._unlogged = 0
        self.version = 0
        """Grows with each change of the users in force: what `current` says may have changed."""
        self.is_stale = False
        """Whether the file as it is now cannot be used."""

    @classmethod
    def of_password(cls, password: str) -> Users:
        """The user ``default`` alone, with every right."""
        return cls({}, password=password)

    @classmethod
    def of_file(cls, path: Path) -> Users:
        """The users of a file, followed as it changes; while it cannot be used, the last good users stay.

        Raises:
            UserError: it cannot be read, others may read it, or a line is wrong (named).
        """
        stamp = _stamp(path)
        users = cls(read_users_file(path), file=path)
        users._seen = stamp
        return users

    def authenticate(self, name: str, password: bytes | str) -> User | None:
        """The user who has this name and password, or None. May take a while, and does when they are wrong; an unknown
        name takes as long as a wrong password."""
        self.refresh()
        given = password.encode() if isinstance(password, str) else password
        if self._password is not None:
            user = self._check_plain(name, given)
        else:
            user, busy = self._check_hash(name, given)
            if busy:
                self._count("busy")
                return None
        self._count("wrong" if user is None else "ok")
        if user is None:
            self._log_failure(name)
            time.sleep(_PENALTY_SECONDS)
        return user

    def current(self, user: User) -> User | None:
        """``user`` as of now: with today's rights, or None if it is gone or its password is another."""
        if self._password is not None:
            return user
        entry = self._entries.get(user.name)
        return entry.user if entry is not None and entry.user.secret_id == user.secret_id else None

    def refresh(self) -> None:
        """Look whether the file has changed (at most once a second) and take it in."""
        if self._file is None or time.monotonic() < self._look_at:
            return
        with self._lock:
            if time.monotonic() < self._look_at:
                return
            self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
            stamp = _stamp(self._file)
            if stamp == self._seen:
                return
            self._seen = stamp
            try:
                entries = read_users_file(self._file)
            except UserError as error:
                self.is_stale = True
                _log.warning("the users file changed and cannot be used, the last good one stays in force: %s", error)
                return
            self.is_stale = False
            self._entries = entries
            self._known = {name: known for name, known in self._known.items() if name in entries}
            self.version += 1
            _log.info("the users file changed: %d users", len(entries))

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        self.refresh()
        yield MetricFamily(m.LOGINS, [((outcome,), float(number)) for outcome, number in self._logins.items()])
        if self._file is not None:
            yield MetricFamily(m.USERS_STALE, [((), float(self.is_stale))])

    def __len__(self) -> int:
        return 1 if self._password is not None else len(self._entries)

    def __repr__(self) -> str:
        return f"Users({len(self)})"

    def _check_plain(self, name: str, given: bytes) -> User | None:
        expected = (self._password or "").encode()
        same = hmac.compare_digest(given, expected)
        return User(DEFAULT_USER) if same and name == DEFAULT_USER else None

    def _check_hash(self, name: str, given: bytes) -> tuple[User | None, bool]:
        """The user or None, and whether the password was not even looked at."""
        entry = self._entries.get(name)
        digest = blake2b(given, key=self._digest_key, digest_size=32).digest()
        if entry is not None and self._is_known(entry, digest):
            return entry.user, False
        if not self._checks.acquire(timeout=_WAIT_SECONDS):
            return None, True
        try:
            if entry is not None and self._is_known(entry, digest):  # one of many at once has paid for all
                return entry.user, False
            right = (entry.hash if entry is not None else self._decoy()).matches(given)
        finally:
            self._checks.release()
        if entry is None or not right:
            return None, False
        self._known[name] = (entry.user.secret_id, digest)
        return self.current(entry.user), False  # it took a while: the file may have changed

    def _is_known(self, entry: Entry, digest: bytes) -> bool:
        secret_id, right = self._known.get(entry.user.name, (b"", b""))
        return secret_id == entry.user.secret_id and hmac.compare_digest(right, digest)

    def _decoy(self) -> Hash:
        """A hash that nothing matches, at the cost of the file's first."""
        first = next(iter(self._entries.values()), None)
        return decoy_hash(first.hash if first is not None else None)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._logins[outcome] += 1

    def _log_failure(self, name: str) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._log_at:
                self._unlogged += 1
                return
            self._log_at = now + _LOG_EVERY_SECONDS
            unlogged, self._unlogged = self._unlogged, 0
        # People type passwords where the name belongs, so only names that are ours are shown.
        known = name in self._entries or (self._password is not None and name == DEFAULT_USER)
        who = f"user {name!r}" if known else "an unknown user"
        more = f" ({unlogged} more failed since the last such line)" if unlogged else ""
        _log.warning("login of %s failed%s", who, more)


def read_users_file(path: Path) -> dict[str, Entry]:
    """The users in ``path`` by name.

    Raises:
        UserError: it cannot be read, is too large, others may read it, or a line is wrong.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}", where="users_file", remedy="make it with 'kvhearth store passwd'"
        ) from None
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise UserError(
            f"others may read or change {path} (mode {stat.S_IMODE(mode):04o})",
            where="users_file",
            remedy=f"chmod 600 {path}",
        )
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} has more than 1 MiB", where="users_file", remedy=f"keep to {MAX_USERS} users")
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8", where="users_file", remedy="make it with passwd") from None
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        where = f"{path}:{number}"
        entry = _parse_line(line.removesuffix("\r"), where)
        if entry.user.name in entries:
            raise UserError(f"user {entry.user.name!r} is there twice", where=where, remedy="remove one of the two")
        if len(entries) == MAX_USERS:
            raise UserError(f"more than {MAX_USERS} users", where=where, remedy="let engines share a user")
        entries[entry.user.name] = entry
    return entries


def make_user(name: str, rights: Iterable[str], prefix: str, *, where: str = "", secret_id: bytes = b"") -> User:
    """A user, checked.

    Raises:
        UserError: the name, a right or the prefix cannot be.
    """
    if not _NAME.fullmatch(name):
        # Not shown: a line that lost its name begins with a hash.
        raise UserError(
            "that is not a user's name", where=where, remedy="use 1 to 64 letters, digits, '_', '.', '@' or '-'"
        )
    chosen = frozenset(rights)
    wrong = sorted(chosen - set(RIGHTS))
    if wrong or not chosen:
        what = f"{wrong[0]!r} is not a right" if wrong else f"user {name!r} has no right"
        raise UserError(what, where=where, remedy=f"give some of {', '.join(RIGHTS)}")
    if len(prefix.encode()) > MAX_PREFIX_BYTES or any(ord(char) <= 32 or ord(char) == 127 for char in prefix):
        remedy = f"give up to {MAX_PREFIX_BYTES} bytes without blanks"
        raise UserError(f"the prefix of user {name!r} cannot begin a key", where=where, remedy=remedy)
    if prefix and "admin" in chosen:
        remedy = "drop the right or the prefix"
        raise UserError(f"user {name!r} is confined to a prefix and has the right admin", where=where, remedy=remedy)
    return User(name, chosen, prefix.encode(), secret_id)


def _parse_line(line: str, where: str) -> Entry:
    fields = line.split(":", 3)
    if len(fields) != 4:
        raise UserError(
            f"{len(fields)} of 4 fields",
            where=where,
            remedy="write name:hash:rights:prefix, or let 'kvhearth store passwd' do it",
        )
    name, phc, rights, prefix = fields
    secret_id = blake2b(phc.encode(), digest_size=16).digest()
    user = make_user(name, [right.strip() for right in rights.split(",")], prefix, where=where, secret_id=secret_id)
    return Entry(user, parse_hash(phc, where=where))


def _stamp(path: Path | None) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode) if found else None
