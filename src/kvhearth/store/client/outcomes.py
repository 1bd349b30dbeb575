"""How calls to the store end. A store is a cache, so every failure is a miss with a reason, never an exception."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from kvhearth.store.protocol.header import Header


class MissReason(Enum):
    """Why a value did not come, or did not get stored."""

    ABSENT = "absent"
    TIMEOUT = "timeout"
    """The call's deadline passed."""
    UNREACHABLE = "unreachable"
    """No connection, or it broke."""
    BREAKER_OPEN = "breaker_open"
    """Recent calls failed, so this one was not tried."""
    BUSY = "busy"
    """Every connection of the client was taken until the deadline."""
    CHECKSUM = "checksum"
    """The bytes are not those that were put under this key; the value was deleted."""
    HEADER = "header"
    """What is stored under this key is not a header and a row that this version reads."""
    TOO_LARGE = "too_large"
    """The row does not fit the buffer, or the store does not keep values of this length."""
    REFUSED = "refused"
    """The store answered with an error: out of memory, wrong password, too many clients."""
    PROTOCOL = "protocol"
    """What answered does not speak RESP."""


class GetResult(NamedTuple):
    """Outcome of a get. On a hit the row is the first ``nbytes`` bytes of the caller's buffer; on a miss the buffer's
    content is undefined."""

    reason: MissReason | None
    header: Header | None = None
    nbytes: int = 0

    @property
    def hit(self) -> bool:
        """Whether the row is there."""
        return self.reason is None


class PutResult(NamedTuple):
    """Outcome of a put."""

    reason: MissReason | None

    @property
    def stored(self) -> bool:
        """Whether the store has taken the row."""
        return self.reason is None


class RecordResult(NamedTuple):
    """Outcome of a get of a small record: ``record`` is None on a miss, and ``reason`` tells absence from an outage."""

    reason: MissReason | None
    record: bytes | None = None


class Miss(Exception):
    """Ends a call inside the client; callers of the client never see it."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
