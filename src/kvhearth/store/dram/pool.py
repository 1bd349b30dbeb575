"""The store's DRAM: one mapping of memory that has a descriptor and no name, faulted in before the first client, handed
out as views. Clients on the same machine may map it too. Who owns which bytes is the allocator's business.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from kvhearth.errors import UserError
from kvhearth.store.dram.allocator import PAGE_BYTES, Run
from kvhearth.units import format_bytes

Progress = Callable[[int, int], None]
"""Called with (bytes faulted in, bytes in all)."""

_STEP_BYTES = 64 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_HEADROOM_BYTES = 64 * 2**20
_HUGE_BYTES = 2 * 2**20


class Pool:
    """``pages`` pages of faulted-in memory.

    Args:
        pages: size in pages of ``PAGE_BYTES``.
        progress: called while the memory is faulted in.
        huge_pages: take it from the huge pages of 2 MiB that the system has set aside.

    Raises:
        UserError: the machine does not have that much memory, or that many huge pages, free.
    """

    def __init__(self, pages: int, progress: Progress | None = None, *, huge_pages: bool = False) -> None:
        unit = _HUGE_BYTES if huge_pages else mmap.PAGESIZE
        nbytes = -(-pages * PAGE_BYTES // unit) * unit
        if huge_pages:
            _refuse_without_huge_pages(nbytes)
        else:
            _refuse_more_than_available(nbytes)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB if huge_pages else 0)
        self.nbytes = nbytes
        """Length of the mapping: the pages, rounded up to whole pages of the system."""
        try:
            self.fd = os.memfd_create("kvhearth-store", flags)
        except OSError as error:
            raise _too_big(nbytes, error.strerror or str(error)) from None
        try:
            os.ftruncate(self.fd, nbytes)
            # Whoever else maps it cannot pull it from under us, nor we from under them.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, nbytes)
            self._view = memoryview(self._map)
            self._fault_in(nbytes, progress)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.fd)
            raise _too_big(nbytes, str(error)) from None
        except BaseException:
            os.close(self.fd)
            raise

    def views(self, runs: Iterable[Run], nbytes: int) -> list[memoryview]:
        """The first ``nbytes`` bytes of ``runs``, one writable view a run."""
        views = []
        for first, count in runs:
            start = first * PAGE_BYTES
            length = min(count * PAGE_BYTES, nbytes)
            views.append(self._view[start : start + length])
            nbytes -= length
        return views

    def close(self) -> None:
        """Give the memory back, at once if nobody holds a view of it, else with the last view."""
        os.close(self.fd)
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            return

    def _fault_in(self, nbytes: int, progress: Progress | None) -> None:
        # First touch costs up to 2 ns a byte; paid here, it never shows up in a put.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE, 0, nbytes)
        for start in range(0, nbytes, _STEP_BYTES):
            length = min(_STEP_BYTES, nbytes - start)
            if not self._advise(_MADV_POPULATE_WRITE, start, length):
                np.frombuffer(self._view[start : start + length], dtype=np.uint8)[:: mmap.PAGESIZE] = 0
            if progress is not None:
                progress(start + length, nbytes)

    def _advise(self, advice: int, start: int, length: int) -> bool:
        try:
            self._map.madvise(advice, start, length)
        except OSError:
            return False
        return True


def _refuse_more_than_available(nbytes: int) -> None:
    available = available_memory_bytes()
    if available is not None and nbytes + _HEADROOM_BYTES > available:
        raise _too_big(nbytes, f"only {format_bytes(available)} of memory is available")


def _refuse_without_huge_pages(nbytes: int) -> None:
    # Where too few are free, the first touch beyond them would kill the process.
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines.get("HugePages_Free", "0").split()[0])
        if lines.get("Hugepagesize", "").split() == ["2048", "kB"] and free * _HUGE_BYTES >= nbytes:
            return
        raise UserError(
            f"{format_bytes(nbytes)} take {nbytes // _HUGE_BYTES} huge pages of 2 MiB, and {free} are free",
            where="huge_pages",
            remedy=f"set them aside (sysctl vm.nr_hugepages={nbytes // _HUGE_BYTES}), or do without",
        )


def _too_big(nbytes: int, reason: str) -> UserError:
    return UserError(
        f"cannot hold {format_bytes(nbytes)}: {reason}",
        where="capacity",
        remedy="lower it or free memory on this machine",
    )


def available_memory_bytes() -> int | None:
    """Memory that this process can still take, by /proc/meminfo and the cgroup's limit; None where neither tells."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        if "MemAvailable" in lines:
            found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    return min(found, default=None)
