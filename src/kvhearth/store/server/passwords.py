"""Hashes of passwords: made and checked; and the files that keep them, written so that a reader sees all or nothing."""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvhearth.errors import UserError

MAX_PASSWORD_BYTES = 512
_COST_LOG2, _BLOCK, _PARALLEL = 14, 8, 1  # 16 MiB; RFC 7914 section 2 names r = 8, p = 1
_SALT_BYTES = 16
_HASH_BYTES = 32
_MOST_MEMORY_BYTES = 256 * 2**20
_MOST_PARALLEL = 16
_PHC = re.compile(
    r"\$scrypt\$ln=(?P<ln>[0-9]{1,2}),r=(?P<r>[0-9]{1,2}),p=(?P<p>[0-9]{1,2})"
    r"\$(?P<salt>[A-Za-z0-9+/]{11,86})\$(?P<hash>[A-Za-z0-9+/]{22,86})"
)


class Hash(NamedTuple):
    """A scrypt hash (RFC 7914) with its parameters: N = 2**cost_log2, r = block, p = parallel."""

    cost_log2: int
    block: int
    parallel: int
    salt: bytes
    digest: bytes

    def matches(self, password: bytes) -> bool:
        """Whether ``password`` gives this hash; takes the same time either way. Releases the GIL."""
        same = hmac.compare_digest(_scrypt(password, self), self.digest)
        return same and 0 < len(password) <= MAX_PASSWORD_BYTES

    def __repr__(self) -> str:
        return f"Hash(ln={self.cost_log2}, r={self.block}, p={self.parallel})"

    def phc(self) -> str:
        """In PHC string form, as in a users file."""
        salt, digest = (base64.b64encode(part).decode().rstrip("=") for part in (self.salt, self.digest))
        return f"$scrypt$ln={self.cost_log2},r={self.block},p={self.parallel}${salt}${digest}"


def hash_password(password: bytes) -> Hash:
    """A new hash of ``password`` under a random salt.

    Raises:
        UserError: it is empty or too long.
    """
    if not 0 < len(password) <= MAX_PASSWORD_BYTES:
        raise UserError(
            f"a password of {len(password)} bytes", where="password", remedy=f"give 1 to {MAX_PASSWORD_BYTES} bytes"
        )
    blank = Hash(_COST_LOG2, _BLOCK, _PARALLEL, secrets.token_bytes(_SALT_BYTES), bytes(_HASH_BYTES))
    return blank._replace(digest=_scrypt(password, blank))


def decoy_hash(like: Hash | None) -> Hash:
    """A hash of no password that costs as much to check as ``like`` (None: as a new one)."""
    if like is None:
        like = Hash(_COST_LOG2, _BLOCK, _PARALLEL, bytes(_SALT_BYTES), bytes(_HASH_BYTES))
    return like._replace(digest=secrets.token_bytes(len(like.digest)))


def parse_hash(text: str, *, where: str = "") -> Hash:
    """Read the PHC string form.

    Raises:
        UserError: it is not that, or would take too much memory or time to check. ``text`` is not repeated.
    """
    found = _PHC.fullmatch(text)
    try:
        if found is None:
            raise ValueError
        costs = int(found["ln"]), int(found["r"]), int(found["p"])
        parsed = Hash(*costs, _unbase64(found["salt"]), _unbase64(found["hash"]))
    except (ValueError, binascii.Error):
        remedy = "set the password anew with 'kvhearth store passwd'"
        raise UserError("the hash is not one that is understood", where=where, remedy=remedy) from None
    memory = 128 * parsed.block << parsed.cost_log2  # RFC 7914 section 2: 128 * N * r bytes
    if parsed.cost_log2 < 10 or parsed.block < 1 or memory > _MOST_MEMORY_BYTES:
        raise UserError(
            f"ln={parsed.cost_log2}, r={parsed.block} is out of bounds",
            where=where,
            remedy="use ln of at least 10 and at most 256 MiB: 128 * 2^ln * r",
        )
    if not 1 <= parsed.parallel <= _MOST_PARALLEL:
        raise UserError(f"p={parsed.parallel} is out of bounds", where=where, remedy=f"use p of 1 to {_MOST_PARALLEL}")
    return parsed


def set_line(path: Path, name: str, line: str | None) -> bool:
    """Put ``line`` in place of that of user ``name`` in a users file (at its end for a new one; None: remove it). The
    file is replaced as a whole, with mode 0600; its other lines stay as they are. Whether the user was there before.

    Raises:
        UserError: the file or its folder cannot be read or written.
    """
    try:
        with _locked(path.parent):
            lines = path.read_text().splitlines() if path.exists() else []
            kept = [other for other in lines if other.partition(":")[0] != name or other.startswith("#")]
            was_there = len(kept) < len(lines)
            if line is not None:
                place = next((i for i, other in enumerate(lines) if other.partition(":")[0] == name), len(kept))
                kept.insert(place, line)
            if line is not None or was_there:
                _replace(path, kept)
            return was_there
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot change {path}: {reason}", where="FILE", remedy="give a file you may write") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two that change the same file at once would lose one change."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, lines: Iterable[str]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _scrypt(password: bytes, like: Hash) -> bytes:
    memory = 128 * like.block << like.cost_log2
    return hashlib.scrypt(
        password or b"\0",  # some versions of OpenSSL take no empty one
        salt=like.salt,
        n=1 << like.cost_log2,
        r=like.block,
        p=like.parallel,
        maxmem=memory + 128 * like.block * like.parallel + 2**20,
        dklen=len(like.digest),
    )


def _unbase64(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


def read_password_file(path: Path, *, where: str) -> str:
    """The password in a file, without white space around it.

    Raises:
        UserError: it cannot be read, or is empty.
    """
    try:
        password = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"cannot read {path}: {reason}", where=where, remedy="give a readable text file") from None
    if not password:
        raise UserError(f"{path} is empty", where=where, remedy="put the password into it")
    return password
