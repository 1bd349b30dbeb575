"""Reads every file of a disk tier's folder and says which are whole. For an operator, while no server uses it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvhearth.errors import UserError
from kvhearth.store.tiers.files import FileError
from kvhearth.store.tiers.folder import (
    ASIDE_NAME,
    LOCK_NAME,
    PIECE_BYTES,
    FolderLockedError,
    lock_folder,
    read_open,
    with_long_key,
)
from kvhearth.store.tiers.names import leaf_of, leaf_path, parse_name

Progress = Callable[[int, int], None]
"""Called with (files read, bytes read)."""


class Tally(NamedTuple):
    """How many files, and how many bytes they have."""

    files: int = 0
    nbytes: int = 0


class FsckReport(NamedTuple):
    """What was found.

    Attributes:
        good: whole files.
        corrupt: files that are not what was written, by flaw (`files.Flaw`), ``unreadable`` for those that the device
            did not give.
        foreign: files of another version, and files that are none of ours. Never deleted.
        leftover: what a killed server left half-written, and what a FLUSHDB had not yet deleted.
        deleted: corrupt files and leftovers that were deleted.
    """

    good: Tally
    corrupt: dict[str, Tally]
    foreign: Tally
    leftover: Tally
    deleted: Tally


class _Tallies:
    def __init__(self) -> None:
        self._by_kind: dict[str, Tally] = {}

    def add(self, kind: str, nbytes: int) -> None:
        old = self._by_kind.get(kind, Tally())
        self._by_kind[kind] = Tally(old.files + 1, old.nbytes + nbytes)

    def report(self) -> FsckReport:
        named = {"good", "foreign", "leftover", "deleted"}
        corrupt = {kind: tally for kind, tally in sorted(self._by_kind.items()) if kind not in named}
        found = {name: self._by_kind.get(name, Tally()) for name in named}
        return FsckReport(corrupt=corrupt, **found)


def fsck(folder: Path, *, delete: bool = False, progress: Progress | None = None) -> FsckReport:
    """Verify every file of ``folder``.

    Args:
        folder: a disk tier's folder.
        delete: delete what is corrupt or left over.
        progress: called after each file.

    Raises:
        UserError: the folder cannot be read, is none of a disk tier, or a server uses it.
    """
    try:
        if not (folder / LOCK_NAME).is_file():
            raise UserError(
                f"{folder} is no folder of a disk tier", where="folder", remedy="name the one that the server was given"
            )
        lock_fd = lock_folder(folder)
    except FolderLockedError:
        raise UserError(f"a server uses {folder}", where="folder", remedy="stop it first") from None
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}", where="folder", remedy="check the path and its rights") from None
    tallies, done = _Tallies(), Tally()
    bounce = memoryview(bytearray(PIECE_BYTES))
    try:
        for path, nbytes in _files(folder):
            kind = _judge(path, folder, bounce)
            tallies.add(kind, nbytes)
            if delete and kind not in ("good", "foreign"):
                with contextlib.suppress(OSError):
                    path.unlink()
                    tallies.add("deleted", nbytes)
            done = Tally(done.files + 1, done.nbytes + nbytes)
            if progress is not None:
                progress(*done)
    finally:
        os.close(lock_fd)
    return tallies.report()


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and path != folder / LOCK_NAME:
                    yield path, status.st_size


def _judge(path: Path, folder: Path, bounce: memoryview) -> str:
    inside = path.relative_to(folder)
    if inside.parts[0] == ASIDE_NAME:
        return "leftover"
    entry = parse_name(path.name)
    try:
        if entry is not None and not entry.key:
            entry = with_long_key(str(path), entry)
        if entry is None or str(inside.parent) != leaf_path(leaf_of(entry.key)):
            return "foreign"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return "unreadable"
    try:
        read_open(fd, entry, bounce, lambda piece: None)
    except FileError as error:
        return error.flaw.value if error.flaw.is_ours else "foreign"
    except OSError:
        return "unreadable"
    finally:
        os.close(fd)
    return "good"
