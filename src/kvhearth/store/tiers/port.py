"""What the store asks of a tier below its DRAM. A tier is a cache of a cache: nothing here raises, whatever fails is a
miss with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvhearth.metrics.spec import MetricFamily


class TierStats(NamedTuple):
    """Figures of one moment.

    Attributes:
        items: values that the index knows.
        value_bytes: bytes of these values.
        stored_bytes: bytes that they take where they lie, headers included.
        capacity_bytes: bound of ``stored_bytes``; 0 for none.
        reads, read_bytes: values read and found right.
        writes, written_bytes: values written.
        evictions: values dropped to make room.
        misses: reads that ended in a miss, by reason (`guard.Reason`, `files.Flaw`).
        refused: writes that were not done, by reason.
        is_down: whether the tier is being skipped.
        ready: whether the index is whole.
    """

    items: int
    value_bytes: int
    stored_bytes: int
    capacity_bytes: int
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    evictions: int
    misses: Mapping[str, int]
    refused: Mapping[str, int]
    is_down: bool
    ready: bool


Watcher = Callable[[bytes, bool], None]
"""Called with a key and whether its value is there now; from any thread, and it returns at once."""


def nobody(key: bytes, is_there: bool) -> None:
    """A `Watcher` that does not care."""


class Tier(Protocol):
    """Values kept by key below the DRAM. Keys are 1 to 512 bytes, values any bytes. Thread-safe; nothing raises."""

    @property
    def name(self) -> str:
        """``disk`` or ``object``; the label of its metrics."""
        ...

    @property
    def letter(self) -> bytes:
        """One byte that names the tier on the wire: ``k`` disk, ``o`` object."""
        ...

    watcher: Watcher
    """Told of each value that the tier finds or loses by itself, not of what `write`, `delete` and `clear` do."""

    @property
    def ready(self) -> bool:
        """Whether the index is whole. Until then ``keys`` and ``stats`` may leave values out; ``has`` may probe."""
        ...

    @property
    def is_down(self) -> bool:
        """Whether the tier is being skipped because it failed. It tries itself again; nobody has to call."""
        ...

    def start(self) -> None:
        """Begin to find what is there already, in a thread of its own; returns at once."""
        ...

    def close(self) -> None:
        """Stop the threads, within seconds. No other call may follow."""
        ...

    def has(self, keys: Sequence[bytes]) -> list[int]:
        """Bytes of the value under each key, 0 where there is none. From memory: it never waits on a device, but for
        a bounded look at the device while the index is not whole. An answer is a hint: only a read is certain.

        This is what counts as a use of the values, so a chain is asked for in one call, head first.
        """
        ...

    def read_into(self, key: bytes, views: list[memoryview], deadline: float) -> bool:
        """Fill ``views`` (together exactly as long as `has` said) with the value, verified.

        Args:
            key: the key.
            views: writable, contiguous pieces. Nothing writes to them after the return, also not after a miss by
                deadline: a hung device is read into memory of the tier's own.
            deadline: monotonic seconds after which the answer is a miss.

        Returns:
            False for a miss, whose reason is counted; the views' content is then undefined.
        """
        ...

    def write(self, key: bytes, views: list[memoryview]) -> bool:
        """Keep the value under ``key``, in place of what is there. Blocks at most for the tier's own timeout. After a
        timeout a hung device may still read ``views``, but what it read is then not kept. False: not kept, and the
        reason is counted."""
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Forget these; how many there were."""
        ...

    def clear(self) -> None:
        """Forget everything. Values that the index does not know yet are forgotten as they are found."""
        ...

    def keys(self) -> Iterator[bytes]:
        """Every key that the index knows, in no order; may miss what comes and goes meanwhile."""
        ...

    def stats(self) -> TierStats:
        """Figures of this moment."""
        ...

    def metrics(self) -> Iterable[MetricFamily]:
        """The same for a scrape, labelled with the tier's name. Several tiers' go through `figures.merged`."""
        ...
