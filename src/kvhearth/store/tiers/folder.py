"""A disk tier's folder on the device: one server at a time, files written aside and renamed, read and verified piece by
piece. Every call may block or raise OSError; what is where, and what goes, is decided elsewhere.

Nothing is synced: a file that a power cut left half-written does not match its checksum and is a miss, which is all
that a cache needs, and syncing would cost most of the device's speed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.store.tiers.files import HEAD_BYTES, Checker, FileError, Flaw, checked_start, parse_head
from kvhearth.store.tiers.guard import Call, Reason, TierError
from kvhearth.store.tiers.names import TOPS, Entry, leaf_of, leaf_path, parse_name, path_of

LOCK_NAME = "lock"
ASIDE_NAME = "tmp"
LONGEST_KEY_BYTES = 512
PIECE_BYTES = 2**20

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_VIEWS = 512  # a writev takes 1,024 at most


class FolderLockedError(Exception):
    """Another server uses the folder."""


class Folder:
    """An opened folder: ours alone until `close`. What a killed server left aside is removed.

    Args:
        path: the folder.
        create: make it if it is not there (its parent must be).

    Raises:
        FolderLockedError: another server has it.
        OSError: it cannot be used.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self._root = str(path)
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        self._lock_fd = lock_folder(path)
        self._numbers = itertools.count()
        self._bounce = threading.local()
        try:
            self._aside = path / ASIDE_NAME
            self._aside.mkdir(mode=0o700, exist_ok=True)
            self._remove_leftovers()
        except OSError:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Let others have the folder."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def check(self) -> None:
        """Whether it is still the folder that was opened.

        Raises:
            TierError: ``missing``: it is gone, or another one is in its place.
            OSError: it cannot be reached.
        """
        try:
            there = os.stat(f"{self._root}/{LOCK_NAME}", follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            raise TierError(Reason.MISSING, sick=False) from None
        if self._lock_fd < 0 or not os.path.samestat(there, os.fstat(self._lock_fd)):
            raise TierError(Reason.MISSING, sick=False)

    def probe(self) -> None:
        """Check, and write a small file to see whether that works."""
        self.check()
        path = self._new_path()
        try:
            with contextlib.closing(_Descriptor(path, _WRITE_FLAGS)) as file:
                os.write(file.fd, bytes(4096))
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def free_bytes(self) -> int:
        """What unprivileged users may still write on this file system."""
        figures = os.statvfs(self._root)
        return figures.f_bavail * figures.f_frsize

    def size_bytes(self) -> int:
        """The file system's size."""
        figures = os.statvfs(self._root)
        return figures.f_blocks * figures.f_frsize

    def write_aside(self, start: bytes, views: list[memoryview]) -> str:
        """Write a file that nobody sees yet; its path, for `publish` or `discard`."""
        path = self._new_path()
        try:
            with contextlib.closing(_Descriptor(path, _WRITE_FLAGS)) as file:
                _write_all(file.fd, [memoryview(start), *views])
        except OSError as error:
            self.discard(path)
            if error.errno == errno.ENOENT:
                self.check()
            raise
        return path

    def publish(self, aside: str, entry: Entry) -> None:
        """Make a file that was written aside visible, whole, under its name."""
        path = f"{self._root}/{path_of(entry)}"
        try:
            os.rename(aside, path)
        except FileNotFoundError:
            self.check()
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.rename(aside, path)

    def discard(self, aside: str) -> None:
        """Remove a file that was written aside."""
        with contextlib.suppress(OSError):
            os.unlink(aside)

    def delete(self, entry: Entry) -> None:
        """Remove the file of ``entry``, if it is there."""
        try:
            os.unlink(f"{self._root}/{path_of(entry)}")
        except FileNotFoundError:
            self.check()

    def read(self, entry: Entry, take: Callable[[memoryview], None]) -> None:
        """Read and verify the file of ``entry``; each piece of the value is given to ``take`` before the next is read.

        Raises:
            FileError: it is not that file. What was taken is worth nothing.
            TierError: ``vanished`` or ``missing``.
            OSError: it cannot be read.
        """
        try:
            file = _Descriptor(f"{self._root}/{path_of(entry)}", _READ_FLAGS)
        except FileNotFoundError:
            self.check()
            raise TierError(Reason.VANISHED, sick=False) from None
        with contextlib.closing(file):
            read_open(file.fd, entry, self._piece_buffer(), take)

    def leaves_there(self, top: int) -> list[int]:
        """The numbers of the leaves that there are in one folder of the first level."""
        try:
            names = set(os.listdir(f"{self._root}/{leaf_path(top * TOPS)[:2]}"))
        except FileNotFoundError:
            self.check()
            return []
        return [leaf for leaf in range(top * TOPS, (top + 1) * TOPS) if leaf_path(leaf)[3:] in names]

    def scan_leaf(self, leaf: int) -> list[Entry]:
        """The entries of one folder by its files' names; only keys that are too long for a name are read."""
        folder = f"{self._root}/{leaf_path(leaf)}"
        entries = []
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            self.check()
            return []
        for name in names:
            entry = parse_name(name)
            if entry is not None and not entry.key:
                entry = with_long_key(f"{folder}/{name}", entry)
            if entry is not None and leaf_of(entry.key) == leaf:
                entries.append(entry)
        return entries

    def set_all_aside(self) -> None:
        """Empty the folder at once; `purge` then frees the space."""
        for top in range(TOPS):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self._root}/{top:02x}", self._new_path())
        self.check()

    def purge_folders(self) -> None:
        """Free the space of what `set_all_aside` took away, also before a restart. May take minutes."""
        for path in list(self._aside.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        for path in list(self._aside.iterdir()):
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)

    def _new_path(self) -> str:
        return f"{self._root}/{ASIDE_NAME}/{os.getpid():x}-{next(self._numbers):x}"

    def _piece_buffer(self) -> memoryview:
        # One for each thread, small enough to stay in its core's cache between the read, the checksum and the copy.
        buffer: memoryview | None = getattr(self._bounce, "buffer", None)
        if buffer is None:
            buffer = self._bounce.buffer = memoryview(bytearray(PIECE_BYTES))
        return buffer


def open_for(path: Path, create: bool, call: Call[Folder]) -> Folder:
    """The folder, for a worker; locked only if somebody still waits for it.

    Raises:
        FolderLockedError, OSError: as `Folder`.
        TierError: nobody does.
    """
    folder = Folder(path, create=create)
    try:
        with call.wanted():
            return folder
    except TierError:
        folder.close()
        raise


def read_for(folder: Folder, entry: Entry, views: list[memoryview], call: Call[Flaw | None]) -> Flaw | None:
    """Read the file of ``entry`` into ``views``, for a worker; what is wrong with it.

    Raises:
        OSError, TierError: as `Folder.read`, or nobody waits for it any more.
    """
    try:
        folder.read(entry, Sink(call, views).take)
    except FileError as error:
        return error.flaw
    return None


class Sink:
    """Copies pieces into a caller's views, one after the other, as long as the caller wants them."""

    def __init__(self, call: Call[Any], views: Iterable[memoryview]) -> None:
        self._call = call
        self._views = [np.frombuffer(view, np.uint8) for view in views if view.nbytes]
        self._at = 0
        self._filled = 0

    def take(self, piece: memoryview) -> None:
        """Copy ``piece``; it must fit.

        Raises:
            TierError: the caller has given up; its memory is not touched.
        """
        source = np.frombuffer(piece, np.uint8)
        with self._call.wanted():
            while len(source):
                view = self._views[self._at]
                count = min(len(source), len(view) - self._filled)
                view[self._filled : self._filled + count] = source[:count]
                source = source[count:]
                self._filled += count
                if self._filled == len(view):
                    self._at, self._filled = self._at + 1, 0


def with_long_key(path: str, entry: Entry) -> Entry | None:
    """The entry with the key that its name had no room for; None: the file does not say, or has gone."""
    try:
        with contextlib.closing(_Descriptor(path, _READ_FLAGS)) as file:
            start = os.pread(file.fd, HEAD_BYTES + LONGEST_KEY_BYTES, 0)
        head = parse_head(start)
    except (FileNotFoundError, FileError):
        return None
    return entry._replace(key=start[HEAD_BYTES : HEAD_BYTES + head.key_bytes])


def read_open(fd: int, entry: Entry, bounce: memoryview, take: Callable[[memoryview], None]) -> None:
    """Read and verify an open file through ``bounce``; see `Folder.read`."""
    start = bytearray(HEAD_BYTES + len(entry.key))
    got = os.preadv(fd, [start, bounce], 0)
    head = checked_start(bytes(start[:got]), entry.key, os.fstat(fd).st_size)
    if head.value_bytes != entry.nbytes:
        raise FileError(Flaw.TRUNCATED)
    check = Checker(head.fields, entry.key)
    offset, piece = got, bounce[: got - len(start)]
    end = len(start) + entry.nbytes
    while True:
        check.feed(piece)
        take(piece)
        if offset >= end:
            break
        got = os.preadv(fd, [bounce], offset)
        if got == 0:
            raise FileError(Flaw.TRUNCATED)
        offset, piece = offset + got, bounce[:got]
    if check.digest() != head.checksum:
        raise FileError(Flaw.CHECKSUM)


class _Descriptor:
    """A file descriptor with a close."""

    def __init__(self, path: str, flags: int) -> None:
        self.fd = os.open(path, flags, 0o600)

    def close(self) -> None:
        os.close(self.fd)


def lock_folder(path: Path) -> int:
    """Take the folder's lock; the descriptor that holds it.

    Raises:
        FolderLockedError: another server has it.
        OSError: the folder is not there, or cannot be written.
    """
    fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise FolderLockedError(str(path)) from None
        raise
    return fd


def is_no_space(error: OSError) -> bool:
    """Whether there was no space left, or none within a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _write_all(fd: int, views: list[memoryview]) -> None:
    # A regular file takes it all, unless it is short of space: then the rest tells why.
    pending = [view.cast("B") if view.format != "B" or view.ndim != 1 else view for view in views if view.nbytes]
    while pending:
        written = os.writev(fd, pending[:_MOST_VIEWS])
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if pending and written:
            pending[0] = pending[0][written:]
