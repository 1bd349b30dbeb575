"""The disk tier: one file a value in a folder of its own, bounded in bytes and files, found again after a restart.

It joins the `Catalog` (what there is), the `Folder` (how it lies there) and the `guard` (what happens when the device
is sick). While a search for files runs, a folder is listed as soon as somebody asks for a key in it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.metrics.spec import MetricFamily
from kvhearth.store.policies import DEFAULT_POLICY
from kvhearth.store.tiers.catalog import Catalog
from kvhearth.store.tiers.figures import Counts, families
from kvhearth.store.tiers.files import FileError, file_bytes, pack_start
from kvhearth.store.tiers.folder import LONGEST_KEY_BYTES, Folder, FolderLockedError, open_for, read_for
from kvhearth.store.tiers.guard import Call, Health, Reason, TierError, Workers, reason_of
from kvhearth.store.tiers.names import Entry, entry_of
from kvhearth.store.tiers.port import TierStats, Watcher, nobody
from kvhearth.store.tiers.search import Search
from kvhearth.store.tiers.writer import Writer

LARGEST_VALUE_BYTES = 2**32 - 1

_BYTES_A_FILE = 64 * 2**10
_FEWEST_FILES, _MOST_FILES = 1024, 4 * 2**20
_OPEN_SECONDS = 10.0
_CHECK_SECONDS = 5.0
_TEND_SECONDS, _TEND_SICK_SECONDS = 1.0, 0.25


class DiskTier:
    """A folder of values.

    Args:
        folder: the folder, this tier's alone; made if its parent is there. On a volume of its own, name a folder inside
            the mount: then a volume that is not mounted is a missing folder, not an empty one.
        capacity_bytes: bound of the files' bytes.
        max_files: bound of their number; 0: one for each 64 KiB, 1,024 to 4 Mi.
        policy: who goes first when it is full; a name of `policies.POLICY_NAMES`.
        reserve_bytes: what is left free on the file system; None: 1 GiB or 5 % of it, whichever is less.
        timeout_seconds: longest that a write, or a deletion, is waited for.
        threads: operations at once; also how many may hang before reads and writes are refused.

    Raises:
        UserError: a value that cannot work, or another server uses the folder. A folder that is missing or not
            permitted is no error: the tier starts down and heals when it appears.
    """

    name = "disk"
    letter = b"k"

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        max_files: int = 0,
        *,
        policy: str = DEFAULT_POLICY,
        reserve_bytes: int | None = None,
        timeout_seconds: float = 10.0,
        threads: int = 8,
    ) -> None:
        _check_arguments(capacity_bytes, max_files, reserve_bytes, timeout_seconds, threads)
        max_files = max_files or min(max(_FEWEST_FILES, capacity_bytes // _BYTES_A_FILE), _MOST_FILES)
        self._path = folder
        self._timeout_seconds = timeout_seconds
        self.watcher: Watcher = nobody
        self._catalog = Catalog(capacity_bytes, max_files, policy, self._tell_watcher)
        self._workers = Workers("store-disk", threads)
        self._counts = Counts()
        self._search = Search(self._catalog, self._workers)
        self._writer = Writer(self._catalog, self._search, self._counts, reserve_bytes)
        self._health = Health(f"disk tier {folder}")
        self._writing = Health(f"disk tier {folder}: writing")
        self._purge_due = True
        self._stamp_lock = threading.Lock()
        self._last_stamp = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="kvhearth-store-disk-tend", daemon=True)
        self._folder: Folder | None = None
        try:
            self._open(create=True)
        except FolderLockedError:
            self._workers.close()
            raise UserError(
                f"{folder} is in use by another server",
                where="disk",
                remedy="give each server a folder of its own, or stop the other one",
            ) from None

    @property
    def ready(self) -> bool:
        """Whether everything in the folder has been found."""
        return self._search.ready

    @property
    def is_down(self) -> bool:
        """Whether the tier is being skipped."""
        return self._folder is None or self._health.is_down

    @property
    def writes_down(self) -> bool:
        """Whether writes are being skipped (no space, read-only), while reads may go on."""
        return self.is_down or self._writing.is_down

    def start(self) -> None:
        """Begin to find what is there, and to watch over the folder."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and let others have the folder."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._search.close()
        self._workers.close()
        if self._folder is not None:
            self._folder.close()

    def has(self, keys: Sequence[bytes]) -> list[int]:
        """See `Tier.has`."""
        folder = self._folder
        if folder is None or self._health.is_down:
            return [0] * len(keys)
        if not self._search.ready:
            self._search.look_for(folder, keys)
        return self._catalog.sizes(keys)

    def read_into(self, key: bytes, views: list[memoryview], deadline: float) -> bool:
        """See `Tier.read_into`."""
        return self._counts.read_by(partial(self._read, key, views, deadline))

    def _read(self, key: bytes, views: list[memoryview], deadline: float) -> int:
        folder = self._need_folder()
        if not self._search.ready:
            self._search.look_for(folder, [key], deadline)
        entry = self._catalog.get(key)
        if entry is None:
            raise TierError(Reason.ABSENT, sick=False)
        if entry.nbytes != sum(view.nbytes for view in views):
            raise TierError(Reason.RESIZED, sick=False)
        try:
            with self._health.watch():
                flaw = self._workers.run(partial(read_for, folder, entry, views), deadline)
        except TierError as error:
            if error.reason is Reason.VANISHED:
                self._catalog.remove_same(entry)
            self._note(error)
            raise
        if flaw is None:
            return entry.nbytes
        if self._catalog.remove_same(entry) and flaw.is_ours:
            self._delete_files([entry])
        raise FileError(flaw)

    def write(self, key: bytes, views: list[memoryview]) -> bool:
        """See `Tier.write`."""
        return self._counts.written_by(partial(self._write, key, views, time.monotonic() + self._timeout_seconds))

    def _write(self, key: bytes, views: list[memoryview], deadline: float) -> int:
        folder = self._need_folder()
        entry = entry_of(key, views, self._stamp())
        if (
            file_bytes(key, entry.nbytes) > self._catalog.capacity_bytes
            or entry.nbytes > LARGEST_VALUE_BYTES
            or not 0 < len(key) <= LONGEST_KEY_BYTES
        ):
            raise TierError(Reason.TOO_LARGE, sick=False)
        try:
            with self._writing.watch():
                self._workers.run(partial(self._writer.put, folder, entry, pack_start(key, views), views), deadline)
        except TierError as error:
            self._note(error)
            raise
        return entry.nbytes

    def _stamp(self) -> int:
        with self._stamp_lock:
            self._last_stamp = max(time.time_ns() // 1000, self._last_stamp + 1)
            return self._last_stamp

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `Tier.delete`."""
        keys = list(dict.fromkeys(keys))
        folder = self._folder
        if folder is not None and not self._search.ready:
            self._search.look_for(folder, keys)
        coming = self._writer.cancel(keys)
        gone = [entry for key in keys if (entry := self._catalog.remove(key)) is not None]
        self._search.forget(self._search.unlisted(keys))
        self._delete_files(gone)
        return len({*coming, *(entry.key for entry in gone)})

    def _delete_files(self, entries: list[Entry]) -> None:
        folder = self._folder
        if not entries:
            return
        try:
            if folder is None:
                raise TierError(Reason.DOWN, sick=False)
            with self._health.watch():
                self._workers.run(
                    lambda call: self._writer.unlink(folder, entries), time.monotonic() + self._timeout_seconds
                )
        except TierError as error:
            self._search.forget(entry.key for entry in entries)
            self._note(error)

    def clear(self) -> None:
        """See `Tier.clear`."""
        self._writer.cancel_all()
        self._search.clear()
        self._try_clear()

    def _try_clear(self) -> None:
        folder = self._folder
        if folder is None:
            return
        try:
            with self._health.watch():
                self._workers.run(lambda call: folder.set_all_aside(), time.monotonic() + self._timeout_seconds)
        except TierError as error:
            self._note(error)
            return
        self._search.cleared()
        self._purge_due = True

    def _tell_watcher(self, key: bytes, is_there: bool) -> None:
        self.watcher(key, is_there)

    def keys(self) -> Iterator[bytes]:
        """See `Tier.keys`."""
        return self._catalog.keys()

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        return self._counts.stats(
            items=len(self._catalog),
            value_bytes=self._catalog.value_bytes,
            stored_bytes=self._catalog.stored_bytes,
            capacity_bytes=self._catalog.capacity_bytes,
            is_down=self.is_down,
            ready=self._search.ready,
        )

    def metrics(self) -> Iterable[MetricFamily]:
        """See `Tier.metrics`."""
        return families(self.name, self.stats(), self._counts, writes_down=self.writes_down)

    def _need_folder(self) -> Folder:
        if self._folder is None or self._health.is_down:
            raise TierError(Reason.DOWN, sick=False)
        return self._folder

    def _note(self, error: TierError) -> None:
        if error.reason is Reason.MISSING:
            self._health.trip(Reason.MISSING)

    def _open(self, *, create: bool) -> None:
        try:
            folder = self._workers.run(partial(open_for, self._path, create), time.monotonic() + _OPEN_SECONDS)
        except OSError as error:
            self._health.trip(reason_of(error))
            return
        except TierError as error:
            self._health.trip(error.reason)
            return
        if self._folder is not None:
            self._folder.close()
            self._search.restart()
        self._folder = folder
        self._health.heal()
        self._writing.heal()

    def _tend(self) -> None:
        while not self._stopping.is_set():
            self._tend_once()
            sick = self.is_down or self._writing.is_down
            self._stopping.wait(_TEND_SICK_SECONDS if sick else _TEND_SECONDS)

    def _tend_once(self) -> None:
        folder = self._folder
        try:
            if folder is None:
                self._open(create=True)
                return
            self._look_after(folder)
        except FolderLockedError:
            self._health.trip(Reason.LOCKED)
        except TierError as error:
            if error.reason is Reason.MISSING:
                self._health.trip(Reason.MISSING)
                # Never made anew: where the volume is gone, its folder would be made on the file system below.
                with contextlib.suppress(FolderLockedError):
                    self._open(create=False)

    def _look_after(self, folder: Folder) -> None:
        with self._health.watch():
            self._workers.run(partial(self._check, folder), time.monotonic() + _CHECK_SECONDS)
        if self._search.clear_due:
            self._try_clear()
        elif self._search.due:
            with self._health.watch():
                self._search.run(folder, self._stopping)
        if self._writing.is_down:
            with self._writing.watch():
                self._workers.run(lambda call: self._writer.check(folder), time.monotonic() + _CHECK_SECONDS)
        if self._purge_due:
            self._workers.submit(lambda call: folder.purge_folders())
            self._purge_due = False

    def _check(self, folder: Folder, call: Call[None]) -> None:
        folder.check()
        entry = self._catalog.some() if self._health.is_down else None
        if entry is None:
            return
        try:  # it went down for its files' sake perhaps, so one of them must be readable
            folder.read(entry, lambda piece: None)
        except FileError:
            return
        except TierError as error:
            if error.reason is not Reason.VANISHED:
                raise


def _check_arguments(
    capacity_bytes: int, max_files: int, reserve_bytes: int | None, timeout_seconds: float, threads: int
) -> None:
    for field, value, least in (
        ("disk_capacity", capacity_bytes, 2**20),
        ("disk_max_files", max_files, 0),
        ("disk_reserve", reserve_bytes or 0, 0),
        ("disk_threads", threads, 1),
    ):
        if value < least:
            raise UserError(f"{value} is too little", where=field, remedy=f"give at least {least}")
    if not 0 < timeout_seconds <= 3600:
        raise UserError(
            f"{timeout_seconds} is out of range", where="disk_timeout_seconds", remedy="give 0 < seconds <= 3600"
        )
