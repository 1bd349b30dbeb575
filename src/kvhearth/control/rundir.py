"""The private directory of one running stack: sockets and, unless told otherwise, logs. Gone when the stack is."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.stack.fields import UNIX_PATH_LIMIT

_PREFIX = "kvhearth-"
_LOCK = "lock"


class RunDir:
    """A 0700 directory under ``$XDG_RUNTIME_DIR`` (or the temporary directory), locked for as long as it is in use.

    A supervisor that is killed cannot clean up; the lock tells the next one, which removes what it finds unlocked.
    """

    def __init__(self) -> None:
        base = _base()
        _sweep(base)
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))  # 0700; hidden from sweeps until it is locked
        self._lock = os.open(made / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(base / made.name.removeprefix("."))

    def socket_path(self, name: str) -> str:
        """Path for a unix socket in here."""
        return str(self.path / name)

    def close(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _base() -> Path:
    """The first directory that is ours to write to and leaves room for a socket's path."""
    room = UNIX_PATH_LIMIT - len(f"/{_PREFIX}12345678/store.sock")
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]  # noqa: S108 - mkdtemp makes a private one
    for candidate in candidates:
        if candidate and len(os.fsencode(candidate)) <= room and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise UserError(
        "no directory for sockets: none is writable with a path short enough for a unix socket",
        where="XDG_RUNTIME_DIR",
        remedy=f"set it to a directory of your own, of at most {room} characters",
    )


def _sweep(base: Path) -> None:
    """Remove the directories of supervisors that were killed: ours, and no longer locked."""
    for left in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = left.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = os.open(left / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
