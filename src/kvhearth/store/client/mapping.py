"""The store's memory as mapped by a client: copies between pieces of it and the caller's own buffers. Which pieces, and
for how long, is the matter of grants.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it
_STEP_BYTES = 4 * 2**20
_COPY_BELOW_BYTES = 4096

# Unlike mmap.madvise this lets other threads run, and it takes seconds in all.
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Identity = tuple[int, int]
"""Of the memory behind a descriptor: device and inode."""


class MappingError(Exception):
    """The memory cannot be mapped; the message says why."""


class Mapping:
    """The memory behind a descriptor, which stays the caller's; unmapped with the last reference.

    It stays whole when the store ends: memory that has a mapping does not go, and it is sealed against shrinking.

    Args:
        nbytes: its length, as the store tells.

    Raises:
        MappingError: it is not that long, could shrink, or there is no address space for it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            length = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or length != nbytes or not nbytes:
                raise MappingError(f"memory of {length} bytes (seals {seals:#x}), where {nbytes} sealed ones were told")
            self._map = mmap.mmap(fd, nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise MappingError(str(error)) from None
        self.identity = identity_of(fd)
        self.nbytes = nbytes
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._ready_bytes = 0

    def copy_out(self, pieces: Sequence[tuple[int, int]], views: Sequence[memoryview]) -> None:
        """From ``pieces`` (offset, length), one after another, to ``views`` until these are full."""
        for shared, own in self._pairs(pieces, views):
            # numpy lets other threads run while it copies, memoryview does not.
            if len(own) < _COPY_BELOW_BYTES:
                own[:] = shared.data
            else:
                np.copyto(np.frombuffer(own, dtype=np.uint8), shared)

    def copy_in(self, views: Sequence[memoryview], pieces: Sequence[tuple[int, int]]) -> None:
        """From ``views``, one after another, to ``pieces`` (offset, length)."""
        for shared, own in self._pairs(pieces, views):
            np.copyto(shared, np.frombuffer(own, dtype=np.uint8))

    def fault_in(self, stop: Callable[[], bool]) -> None:
        """Take the page faults of the whole mapping now, unless ``stop``: a first touch costs four times as much."""
        for start in range(0, self.nbytes, _STEP_BYTES):
            if stop() or not self._populate(start, min(_STEP_BYTES, self.nbytes - start)):
                return
            self._ready_bytes = start + _STEP_BYTES

    def _pairs(
        self, pieces: Sequence[tuple[int, int]], views: Sequence[memoryview]
    ) -> Iterator[tuple[NDArray[np.uint8], memoryview]]:
        rest = iter(views)
        view: memoryview | None = next(rest, None)
        for offset, length in pieces:
            start, end = offset, offset + length
            if end > self._ready_bytes and length >= _COPY_BELOW_BYTES:
                page = start // mmap.PAGESIZE * mmap.PAGESIZE
                self._populate(page, end - page)
            while start < end and view is not None:
                count = min(end - start, len(view))
                if count:
                    yield self._bytes[start : start + count], view[:count]
                start += count
                view = view[count:] if count < len(view) else next(rest, None)

    def _populate(self, start: int, length: int) -> bool:
        return bool(_madvise(self._bytes.ctypes.data + start, length, _MADV_POPULATE_READ) == 0)


def identity_of(fd: int) -> Identity:
    """Which memory a descriptor is of."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
