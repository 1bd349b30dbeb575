"""What feeds need of the KV index, and what they show of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvhearth.routing.index import Medium, StoredBlocks


class Index(Protocol):
    """The index's ears; see `kvhearth.routing.index.KvIndex`."""

    def join(self, target: str, pool: str = "") -> None:
        """The target exists and shares the pool's store."""

    def leave(self, target: str) -> None:
        """The target is gone for good."""

    def set_silence(self, target: str, reason: str) -> None:
        """Why nothing reliable is known of the target; "" = all is well."""

    def stored(self, target: str, medium: Medium, stored: StoredBlocks) -> None:
        """The target holds these blocks."""

    def removed(self, target: str, medium: Medium, hashes: Iterable[int], kv_group: int = 0) -> None:
        """The target holds these blocks no more on this medium."""

    def cleared(self, target: str, medium: Medium | None = None) -> None:
        """The target's cache was emptied."""

    def forget(self, target: str) -> None:
        """Nothing that was said of the target is true any more."""

    def store_put(self, pool: str, hashes: Iterable[int], chunk_blocks: int = 0) -> None:
        """The pool's store holds the chunks that end in these blocks."""

    def store_evicted(self, pool: str, hashes: Iterable[int]) -> None:
        """The pool's store holds these no more."""

    def store_cleared(self, pool: str) -> None:
        """The pool's store is empty."""


@dataclass(slots=True)
class FeedState:
    """How a feed fares. Written by the feed alone.

    Attributes:
        connected: to its source, now.
        batches: messages taken.
        events: by kind (``stored``, ``removed``, ``cleared``; of a store ``snapshot``, ``put``, ``evict``, ``clear``).
        ignored: what was left out, by reason.
        healed: holes in what was heard, by what closed them (``replay``, ``snapshot``, ``relearn``).
        restarts: lives of the source that ended, as the feed noticed.
        duplicates: messages that had been heard before.
        failures: attempts on the source that failed, by reason.
        lag_seconds: from the source's clock to ours, of the last message that came live; never below 0.
        silent: requests go there, and nothing is heard.
    """

    connected: bool = False
    batches: int = 0
    events: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    healed: Counter[str] = field(default_factory=Counter)
    restarts: int = 0
    duplicates: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    lag_seconds: float = 0.0
    silent: bool = False
