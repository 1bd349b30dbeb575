"""Finding a disk tier's files again: all folders in the background, or one as soon as somebody asks for a key in it;
and what must not be found again. Decides nothing about what is kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from kvhearth.store.tiers.catalog import Catalog
from kvhearth.store.tiers.folder import Folder
from kvhearth.store.tiers.guard import Call, TierError, Workers
from kvhearth.store.tiers.names import LEAVES, TOPS, leaf_of

_LOOK_SECONDS = 0.25
_LIST_SECONDS = 60.0
_AT_ONCE = 4
_MOST_FORGOTTEN = 65_536


class Search:
    """Fills a catalog from a folder. Thread-safe.

    Attributes:
        ready: everything has been found.
        due: a search should `run`.
        clear_due: all files are to go first (`clear`); until they have, nothing is found.
    """

    def __init__(self, catalog: Catalog, workers: Workers) -> None:
        self._catalog = catalog
        self._workers = workers
        self._searchers = Workers("store-disk-search", _AT_ONCE)  # a search takes no turn of a read
        self._lock = threading.Lock()
        self._listed = bytearray(LEAVES)
        self._forgotten: set[bytes] = set()
        self._epoch = 0
        self.ready = False
        self.due = True
        self.clear_due = False

    def close(self) -> None:
        """Let the threads end."""
        self._searchers.close()

    def restart(self) -> None:
        """Another folder may lie there now: nothing is known of it but what must not be in it."""
        self._forget_listing(tell=True)

    def clear(self, *, tell: bool = False) -> None:
        """Empty the catalog (``tell``: as `Catalog.clear`), and find nothing until the files have gone (`cleared`)."""
        with self._lock:
            self._forgotten.clear()
            self.clear_due = True
        self._forget_listing(tell=tell)

    def cleared(self) -> None:
        """The files have gone."""
        with self._lock:
            self.clear_due = False

    def _forget_listing(self, *, tell: bool) -> None:
        with self._lock:
            self._epoch += 1
            self._listed = bytearray(LEAVES)
            self._catalog.clear(tell=tell)
            self.ready = False
            self.due = True

    def forget(self, keys: Iterable[bytes]) -> None:
        """These are deleted but their files may be there still: they must not come back."""
        with self._lock:
            self._forgotten.update(keys)
            self.due = self.due or bool(self._forgotten)
            too_many = len(self._forgotten) > _MOST_FORGOTTEN
        if too_many:  # rather nothing comes back than something that was deleted
            self.clear(tell=True)

    def unlisted(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those whose folder has not been listed yet."""
        return [] if self.ready else [key for key in keys if not self._listed[leaf_of(key)]]

    def look_for(self, folder: Folder, keys: Sequence[bytes], deadline: float = math.inf) -> None:
        """List the folders of these keys, as far as needed and as far as it goes in a quarter of a second, or until
        ``deadline`` (monotonic seconds)."""
        leaves = dict.fromkeys(leaf_of(key) for key in self.unlisted(keys) if key not in self._catalog)
        if leaves:
            try:
                deadline = min(deadline, time.monotonic() + _LOOK_SECONDS)
                self._workers.run(partial(self._list_all, folder, leaves), deadline)
            except (TierError, OSError):
                return  # what was not found is a miss; whether the device is sick, the search will tell

    def _list_all(self, folder: Folder, leaves: Iterable[int], call: Call[None]) -> None:
        for leaf in leaves:
            with call.wanted():
                pass
            self.list_leaf(folder, leaf)

    def _list_top(self, folder: Folder, top: int, call: Call[None]) -> None:
        self._list_all(folder, folder.leaves_there(top), call)

    def list_leaf(self, folder: Folder, leaf: int) -> None:
        """Find what is in one folder. For one of the workers.

        Raises:
            OSError, TierError: it cannot be listed.
        """
        epoch = self._epoch
        entries = folder.scan_leaf(leaf)
        with self._lock:
            if epoch != self._epoch or self.clear_due:
                return
            surplus = [entry for entry in entries if entry.key in self._forgotten]
            if surplus:
                entries = [entry for entry in entries if entry.key not in self._forgotten]
            surplus += self._catalog.found(entries)
            self._listed[leaf] = 1
        for entry in surplus:
            folder.delete(entry)

    def run(self, folder: Folder, stopping: threading.Event) -> None:
        """Find everything; sets ``ready`` when done.

        Raises:
            OSError, TierError: a folder cannot be listed; ``due`` stays.
        """
        with self._lock:
            epoch, forgotten = self._epoch, set(self._forgotten)
            self._catalog.begin_search()
        running: deque[Call[None]] = deque()
        for top in range(TOPS):
            if stopping.is_set():
                return
            if len(running) == _AT_ONCE:
                running.popleft().result(time.monotonic() + _LIST_SECONDS)
            running.append(self._searchers.submit(partial(self._list_top, folder, top)))
        for call in running:
            call.result(time.monotonic() + _LIST_SECONDS)
        with self._lock:
            if epoch != self._epoch or self.clear_due:
                return
            self._catalog.end_search()
            self._forgotten -= forgotten
            self.ready = True
            self.due = bool(self._forgotten)

    def come_back(self, key: bytes) -> None:
        """A value is being written under ``key`` anew."""
        if self._forgotten:
            with self._lock:
                self._forgotten.discard(key)
