"""How a file comes into a disk tier's folder: room by the bounds, space on the file system, the old file gone, the new
one renamed in; and how files go. Runs on the tier's workers; the device may block it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence

from kvhearth.store.tiers.catalog import Catalog
from kvhearth.store.tiers.figures import Counts
from kvhearth.store.tiers.files import file_bytes
from kvhearth.store.tiers.folder import Folder, is_no_space
from kvhearth.store.tiers.guard import Call, Reason, TierError
from kvhearth.store.tiers.names import Entry, leaf_of
from kvhearth.store.tiers.search import Search

DEFAULT_RESERVE_BYTES = 2**30
DEFAULT_RESERVE_SHARE = 0.05


class Writer:
    """Writes and deletes files, and keeps the catalog in step. Thread-safe.

    Args:
        reserve_bytes: what is left free on the file system; None: 1 GiB or 5 % of it, whichever is less.
    """

    def __init__(self, catalog: Catalog, search: Search, counts: Counts, reserve_bytes: int | None) -> None:
        self._catalog = catalog
        self._search = search
        self._counts = counts
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._coming: dict[bytes, bool] = {}  # what is being written, and whether it may appear
        self._short_bytes = 0

    def cancel(self, keys: Sequence[bytes]) -> list[bytes]:
        """Let what is being written under these keys not appear; those of them that were."""
        with self._lock:
            coming = [key for key in keys if self._coming.get(key)]
            self._coming |= dict.fromkeys(coming, False)
            return coming

    def cancel_all(self) -> None:
        """Let nothing appear that is being written now."""
        with self._lock:
            self._coming = dict.fromkeys(self._coming, False)

    def check(self, folder: Folder) -> None:
        """Whether writing works.

        Raises:
            OSError, TierError: it does not.
        """
        if folder.free_bytes() < self._reserve(folder) + self._short_bytes:
            raise TierError(Reason.NO_SPACE)
        folder.probe()

    def put(self, folder: Folder, entry: Entry, start: bytes, views: list[memoryview], call: Call[None]) -> None:
        """Write the file of ``entry``: ``start`` (`files.pack_start`), then ``views``.

        Raises:
            OSError, TierError: it is not there.
        """
        with self._lock:
            if entry.key in self._coming:  # also one that may not appear: of two at once, one's file would stay behind
                raise TierError(Reason.BUSY, sick=False)
            self._coming[entry.key] = True
        nbytes = file_bytes(entry.key, entry.nbytes)
        reserved = False
        try:
            gone = self._catalog.reserve(nbytes)
            if gone is None:
                raise TierError(Reason.NO_ROOM, sick=False)
            reserved = True
            self._evict(folder, gone)
            aside = self._write_aside(folder, nbytes, start, views)
            try:
                with call.wanted():
                    pass
                self._replace(folder, aside, entry)
            except BaseException:
                folder.discard(aside)
                raise
            reserved = False
            self._catalog.add(entry)
            with self._lock:
                is_deleted = not self._coming[entry.key]
            # Nor may it stay if it came so late that its caller was told that it had not.
            if (is_deleted or not call.is_wanted) and self._catalog.remove_same(entry):
                self.unlink(folder, [entry])
        finally:
            if reserved:
                self._catalog.unreserve(nbytes)
            with self._lock:
                del self._coming[entry.key]

    def _replace(self, folder: Folder, aside: str, entry: Entry) -> None:
        # The old file goes first: a crash in between is a miss, never the old value.
        if self._search.unlisted([entry.key]):
            self._search.list_leaf(folder, leaf_of(entry.key))
        self._search.come_back(entry.key)
        old = self._catalog.remove(entry.key)
        if old is not None:
            folder.delete(old)
        folder.publish(aside, entry)

    def _write_aside(self, folder: Folder, nbytes: int, start: bytes, views: list[memoryview]) -> str:
        self._make_space(folder, nbytes)
        try:
            return folder.write_aside(start, views)
        except OSError as error:
            if not is_no_space(error):
                raise
        # What `statvfs` promised is not to be had: a quota, or others were faster.
        self._evict(folder, self._catalog.evict(nbytes))
        return folder.write_aside(start, views)

    def _make_space(self, folder: Folder, nbytes: int) -> None:
        for _ in range(3):
            short = self._reserve(folder) + nbytes - folder.free_bytes()
            if short <= 0:
                self._short_bytes = 0
                return
            if short > self._catalog.stored_bytes:
                break  # others fill it: what we have is worth more than a room that is still too small
            self._evict(folder, self._catalog.evict(short))
        self._short_bytes = nbytes
        raise TierError(Reason.NO_SPACE)

    def _reserve(self, folder: Folder) -> int:
        if self._reserve_bytes is not None:
            return self._reserve_bytes
        return min(DEFAULT_RESERVE_BYTES, int(folder.size_bytes() * DEFAULT_RESERVE_SHARE))

    def _evict(self, folder: Folder, gone: Sequence[Entry]) -> None:
        self._counts.evicted(len(gone))
        self.unlink(folder, gone)

    def unlink(self, folder: Folder, entries: Iterable[Entry]) -> None:
        """Delete files that the catalog knows no more.

        Raises:
            OSError, TierError: some are still there; the search will not find them again.
        """
        pending = deque(entries)
        try:
            while pending:
                folder.delete(pending[0])
                pending.popleft()
        except (OSError, TierError):
            self._search.forget(entry.key for entry in pending)
            raise
