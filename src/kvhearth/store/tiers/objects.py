"""The object tier: one object a value, in a bucket that several nodes may share, or in a folder that they mount.

It joins `Known` (what there is, as far as known), the `Bucket` (the calls) and the `guard` (what happens when it is
sick). Deletions are done in the background, in batches.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from kvhearth.errors import UserError
from kvhearth.metrics.spec import MetricFamily
from kvhearth.store.tiers.bucket import Bucket, Listed, S3Access
from kvhearth.store.tiers.figures import Counts, families
from kvhearth.store.tiers.files import FileError, file_bytes, pack_start, parse_file
from kvhearth.store.tiers.folder import LONGEST_KEY_BYTES, Sink
from kvhearth.store.tiers.guard import Call, Health, Reason, TierError, Workers
from kvhearth.store.tiers.known import Known
from kvhearth.store.tiers.port import TierStats, Watcher, nobody

_log = logging.getLogger(__name__)

_LARGEST_VALUE_BYTES = 5 * 10**9  # one S3 PUT takes 5 GB
_TEND_SECONDS, _TEND_SICK_SECONDS = 0.5, 0.25
_MOST_DOOMED = 65_536
_DELETE_BATCH = 500
_TRIM_TO = 0.95


class ObjectTier:
    """Values in an object store. Its time-outs bound every call; a failed one is tried again twice within them.

    Args:
        url: ``s3://bucket/prefix`` (any S3: AWS, Ceph RGW, SeaweedFS) or ``file:///path`` (the folder must be there).
        access: endpoint, region and credentials of an ``s3://``; what is not given comes from the environment.
        max_bytes: bound of all nodes' objects under ``url`` together: whichever node finds it passed deletes the
            oldest; 0 for none. Passed by what is put between two listings.
        max_objects: most that this node knows of.
        relist_seconds: how often the bucket is listed, to learn what other nodes put and deleted.
        timeout_seconds: of one call.
        concurrency: calls at once.

    Raises:
        UserError: a value that cannot work. A bucket that is missing or not permitted is no error: the tier goes down
            and heals when it can be used.
    """

    name = "object"
    letter = b"o"

    def __init__(
        self,
        url: str,
        *,
        access: S3Access = S3Access(),
        max_bytes: int = 0,
        max_objects: int = 2**20,
        relist_seconds: float = 300.0,
        timeout_seconds: float = 10.0,
        concurrency: int = 8,
        retries: int = 2,
    ) -> None:
        _check_arguments(max_bytes, max_objects, relist_seconds, timeout_seconds, concurrency, retries)
        self._bucket = Bucket(url, access, timeout_seconds, retries)
        self._max_bytes = max_bytes
        self._relist_seconds = relist_seconds
        self._timeout_seconds = timeout_seconds
        self.watcher: Watcher = nobody
        self._known = Known(max_objects, self._tell_watcher)
        self._workers = Workers("store-object", concurrency)
        self._counts = Counts()
        self._health = Health(f"object tier {url}")
        self._writing = Health(f"object tier {url}: writing")
        self._lock = threading.Lock()
        self._doomed: dict[bytes, None] = {}
        self._clear_due = False
        self._may_delete = True
        self._ready = False
        self._next_listing = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._tend, name="kvhearth-store-object-tend", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether the bucket has been listed once."""
        return self._ready

    @property
    def is_down(self) -> bool:
        """Whether the tier is being skipped."""
        return self._health.is_down

    @property
    def writes_down(self) -> bool:
        """Whether writes are being skipped, while reads may go on."""
        return self.is_down or self._writing.is_down

    def start(self) -> None:
        """Begin to list what is there, and to watch over the bucket."""
        self._thread.start()

    def close(self) -> None:
        """Stop; deletions that wait are tried once more."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._workers.close()

    def has(self, keys: Sequence[bytes]) -> list[int]:
        """See `Tier.has`. Never asks the bucket: until the listing came to an object, it is not there."""
        return [0] * len(keys) if self._health.is_down else self._known.sizes(keys)

    def read_into(self, key: bytes, views: list[memoryview], deadline: float) -> bool:
        """See `Tier.read_into`."""
        return self._counts.read_by(partial(self._read, key, views, deadline))

    def _read(self, key: bytes, views: list[memoryview], deadline: float) -> int:
        nbytes = self._known.sizes([key])[0]
        if key not in self._known:
            raise TierError(Reason.ABSENT, sick=False)
        if nbytes != sum(view.nbytes for view in views):
            raise TierError(Reason.RESIZED, sick=False)
        try:
            with self._health.watch():
                flaw = self._workers.run(partial(self._fetch, key, nbytes, views), deadline)
        except TierError as error:
            if error.reason is Reason.VANISHED and self._known.remove(key):
                self.watcher(key, False)
            raise
        if flaw is None:
            return nbytes
        if self._known.remove(key):
            self.watcher(key, False)
        if flaw.flaw.is_ours:
            self._doom([key])
        raise flaw

    def _fetch(
        self, key: bytes, nbytes: int, views: list[memoryview], call: Call[FileError | None]
    ) -> FileError | None:
        try:
            value = parse_file(self._bucket.get(key, file_bytes(key, nbytes)), key)
        except FileError as error:
            return error  # the bucket is well: it answered
        Sink(call, views).take(value)
        return None

    def write(self, key: bytes, views: list[memoryview]) -> bool:
        """See `Tier.write`."""
        return self._counts.written_by(partial(self._write, key, views, time.monotonic() + self._timeout_seconds))

    def _write(self, key: bytes, views: list[memoryview], deadline: float) -> int:
        nbytes = sum(view.nbytes for view in views)
        if self._health.is_down:
            raise TierError(Reason.DOWN, sick=False)
        if not 0 < len(key) <= LONGEST_KEY_BYTES or nbytes > (self._max_bytes or _LARGEST_VALUE_BYTES):
            raise TierError(Reason.TOO_LARGE, sick=False)
        with self._writing.watch():
            self._workers.run(partial(self._put, key, pack_start(key, views), views), deadline)
        return nbytes

    def _put(self, key: bytes, start: bytes, views: list[memoryview], call: Call[None]) -> None:
        with call.wanted():
            body = b"".join([start, *views])
        with self._lock:
            was_doomed = key in self._doomed
            self._doomed.pop(key, None)
        try:
            self._bucket.put(key, body)
        except BaseException:
            if was_doomed:  # what was to go is there still
                self.delete([key])
            raise
        if not call.is_wanted:  # its caller was told that it is not kept, and would not delete it
            self.delete([key])
            return
        with self._lock:
            deleted = key in self._doomed
            if not deleted:
                self._known.add(Listed(key, len(body) - len(start), int(time.time())))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `Tier.delete`. Known or not, their objects are deleted soon; beyond 65,536 that wait (the bucket is
        down), the first of them are left, and a listing may find them again."""
        keys = list(dict.fromkeys(keys))
        self._doom(keys)
        return sum(self._known.remove(key) for key in keys)

    def _doom(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._doomed.update(dict.fromkeys(keys))
            for key in list(islice(self._doomed, max(0, len(self._doomed) - _MOST_DOOMED))):
                del self._doomed[key]

    def clear(self) -> None:
        """See `Tier.clear`: all objects under the URL, whoever put them, but not what this node puts from now on."""
        with self._lock:
            self._doomed.clear()
            self._clear_due = True
        self._known.clear()

    def _tell_watcher(self, key: bytes, is_there: bool) -> None:
        self.watcher(key, is_there)

    def keys(self) -> Iterator[bytes]:
        """See `Tier.keys`."""
        return self._known.keys()

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        return self._counts.stats(
            items=len(self._known),
            value_bytes=self._known.value_bytes,
            stored_bytes=self._known.stored_bytes,
            capacity_bytes=self._max_bytes,
            is_down=self.is_down,
            ready=self._ready,
        )

    def metrics(self) -> Iterable[MetricFamily]:
        """See `Tier.metrics`."""
        return families(self.name, self.stats(), self._counts, writes_down=self.writes_down)

    def _tend(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TierError):
                self._tend_once()
            self._stopping.wait(_TEND_SICK_SECONDS if self.writes_down else _TEND_SECONDS)
        if not self.is_down:
            with contextlib.suppress(TierError):
                self._delete_doomed()

    def _tend_once(self) -> None:
        if self._health.is_down:
            with self._health.watch():
                self._bucket.check_reading()
            self._next_listing = 0.0
        if self._clear_due:
            self._delete_all()
        self._delete_doomed()
        if time.monotonic() >= self._next_listing:
            self._list()
        self._trim()
        if self._writing.is_down:
            with self._writing.watch():
                self._bucket.check_writing()

    def _list(self) -> None:
        epoch = self._known.begin_listing()
        with self._health.watch():
            for page in self._bucket.pages():
                with self._lock:
                    wanted = [item for item in page if item.key not in self._doomed]
                    if self._clear_due or not self._known.listed(wanted, epoch):
                        return
                if self._stopping.is_set():
                    return
        if self._known.end_listing(epoch):
            self._ready = True
            self._next_listing = time.monotonic() + self._relist_seconds

    def _delete_all(self) -> None:
        with self._health.watch():
            for page in self._bucket.pages():
                self._delete_batch([item.key for item in page if item.key not in self._known])
                if self._stopping.is_set():
                    return
        self._clear_due = False

    def _delete_doomed(self) -> None:
        while self._doomed:
            with self._lock:
                batch = list(islice(self._doomed, _DELETE_BATCH))
            with self._health.watch():
                self._delete_batch(batch)
            with self._lock:
                for key in batch:
                    self._doomed.pop(key, None)

    def _delete_batch(self, keys: list[bytes]) -> None:
        try:
            self._bucket.delete(keys)
        except TierError as error:
            if error.reason is not Reason.DENIED:
                raise
            if self._may_delete:
                self._may_delete = False
                _log.warning("object tier: not permitted to delete; what is deleted here stays in the bucket")

    def _trim(self) -> None:
        if not self._max_bytes or self._known.stored_bytes <= self._max_bytes:
            return
        oldest = self._known.oldest(self._known.stored_bytes - int(self._max_bytes * _TRIM_TO))
        self._counts.evicted(self.delete(oldest))
        for key in oldest:
            self.watcher(key, False)
        self._delete_doomed()


def _check_arguments(
    max_bytes: int, max_objects: int, relist_seconds: float, timeout_seconds: float, concurrency: int, retries: int
) -> None:
    for field, value, least in (
        ("object_max_bytes", max_bytes, 0),
        ("object_max_objects", max_objects, 1),
        ("object_concurrency", concurrency, 1),
        ("object_retries", retries, 0),
    ):
        if value < least:
            raise UserError(f"{value} is too few", where=field, remedy=f"give at least {least}")
    for field, seconds in (("object_relist_seconds", relist_seconds), ("object_timeout_seconds", timeout_seconds)):
        if not 0 < seconds <= 86_400:
            raise UserError(f"{seconds} is out of range", where=field, remedy="give 0 < seconds <= 86400")
