"""What a store server is told: where to listen, how much to hold, and every bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.store.address import Address, parse_address
from kvhearth.store.allocator import PAGE_BYTES
from kvhearth.store.header import HEADER_BYTES
from kvhearth.units import format_bytes

MAX_KEY_BYTES = 512
MIN_CAPACITY_BYTES = 2**20
DEFAULT_MAX_VALUE_BYTES = 64 * 2**20
DEFAULT_LISTEN = "127.0.0.1:7420"

_ITEM_BYTES = 2048
_MIN_ITEMS = 1024


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store server's settings.

    Args:
        capacity_bytes: memory for values, all of it taken and faulted in at start.
        listen: TCP address ``host:port`` (port 0: any free port), or None for none.
        unix: path of a unix socket, or None for none.
        metrics_listen: loopback address of the HTTP port with /health and /metrics, or None for none.
        password: what clients must AUTH with; None for none. Needed to listen beyond loopback.
        max_value_bytes: longest value kept; 0 = 64 MiB or half of the capacity, whichever is less.
        max_items: most values held; 0 = one for each 2 KiB of capacity, at least 1,024. Bounds the memory beside the
            pool: a key of up to ``MAX_KEY_BYTES`` and some 500 bytes of bookkeeping each.
        max_connections: clients at once, each with a thread and about 100 KiB.
        idle_timeout_seconds: a connection without a command for so long is closed.
        stall_timeout_seconds: a command must arrive, or its answer be taken, within this time.

    Raises:
        UserError: a value that cannot work, naming the field.
    """

    capacity_bytes: int
    listen: str | None = DEFAULT_LISTEN
    unix: Path | None = None
    metrics_listen: str | None = None
    password: str | None = field(default=None, repr=False)
    max_value_bytes: int = 0
    max_items: int = 0
    max_connections: int = 256
    idle_timeout_seconds: float = 300.0
    stall_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.listen is None and self.unix is None:
            raise UserError(
                "nowhere to listen", where="listen", remedy="give a TCP address, a unix socket path, or both"
            )
        if self.capacity_bytes < MIN_CAPACITY_BYTES:
            raise UserError(f"{self.capacity_bytes} bytes is too little", where="capacity", remedy="give at least 1MiB")
        if not 0 <= self.max_value_bytes <= self.capacity_bytes // 2:
            raise UserError(
                f"{self.max_value_bytes} bytes do not fit a store of {format_bytes(self.capacity_bytes)}",
                where="max_value",
                remedy=f"give at most half of the capacity, {format_bytes(self.capacity_bytes // 2)}",
            )
        for name, least in (("max_items", 0), ("max_connections", 1)):
            if getattr(self, name) < least:
                raise UserError(f"{getattr(self, name)} is too few", where=name, remedy=f"give at least {least}")
        for name in ("idle_timeout_seconds", "stall_timeout_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise UserError(
                    f"{getattr(self, name)} is out of range", where=name, remedy="give 0 < seconds <= 86400"
                )
        self._check_exposure()

    @property
    def value_limit_bytes(self) -> int:
        """Longest value kept, the default resolved."""
        return self.max_value_bytes or min(DEFAULT_MAX_VALUE_BYTES, self.capacity_bytes // 2)

    @property
    def item_limit(self) -> int:
        """Most values held, the default resolved."""
        return self.max_items or max(_MIN_ITEMS, self.capacity_bytes // _ITEM_BYTES)

    def values_held(self, row_bytes: int) -> int:
        """How many values of ``row_bytes`` behind their header there is room for."""
        pages = -(-(HEADER_BYTES + row_bytes) // PAGE_BYTES)
        return min(self.item_limit, self.capacity_bytes // PAGE_BYTES // pages)

    @property
    def listen_address(self) -> Address | None:
        """``listen``, parsed."""
        return parse_address(self.listen, where="listen") if self.listen is not None else None

    @property
    def unix_address(self) -> Address | None:
        """``unix``, checked."""
        return parse_address(f"unix:{self.unix}", where="unix") if self.unix is not None else None

    @property
    def metrics_address(self) -> Address | None:
        """``metrics_listen``, parsed."""
        return parse_address(self.metrics_listen, where="metrics_listen") if self.metrics_listen is not None else None

    def _check_exposure(self) -> None:
        if self.password is not None and not self.password:
            raise UserError("the password is empty", where="password", remedy="set a longer one, or none at all")
        listen, metrics, unix = self.listen_address, self.metrics_address, self.unix_address
        if listen is not None and not listen.is_loopback and self.password is None:
            raise UserError(
                f"{listen} can be reached from other machines and there is no password",
                where="listen",
                remedy="set KVHEARTH_STORE_PASSWORD or a password file, or listen on 127.0.0.1",
            )
        if listen is not None and listen.is_unix:
            raise UserError(f"{listen} is not a TCP address", where="listen", remedy="name the socket file under unix")
        if metrics is not None and not metrics.is_loopback:
            raise UserError(
                f"{metrics} is not a loopback address",
                where="metrics_listen",
                remedy="listen on 127.0.0.1 and put a proxy before it",
            )
        if unix is not None and not unix.is_unix:
            raise UserError(f"{self.unix} is not a path", where="unix", remedy="give the path of a socket file")
