"""What a store server is told: where to listen, how much to hold, and every bound.

Each setting is one field with its line of help; flags, environment, YAML and the reference page are made from these
(`settings`). Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.store.dram.allocator import PAGE_BYTES
from kvhearth.store.protocol.address import Address, parse_address
from kvhearth.store.protocol.header import HEADER_BYTES
from kvhearth.units import format_bytes

MIN_CAPACITY_BYTES = 2**20
DEFAULT_CAPACITY_BYTES = 2**30
DEFAULT_MAX_VALUE_BYTES = 64 * 2**20
DEFAULT_LISTEN = "127.0.0.1:7420"
WRITE_MODES = ("back", "through")
_LONGEST_TTL_SECONDS = 366 * 86_400

_ITEM_BYTES = 2048
_MIN_ITEMS = 1024


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store server's settings; what each means is in its ``help``. Paths are not looked at here.

    Raises:
        UserError: a value that cannot work, naming the setting.
    """

    capacity_bytes: int = field(
        default=DEFAULT_CAPACITY_BYTES, metadata=_help("Memory for values, all of it taken and faulted in at start.")
    )
    listen: str | None = field(
        default=DEFAULT_LISTEN,
        metadata=_help(
            "TCP address host:port; port 0 takes a free one, 'none' is none. Not given: none when a unix socket is."
        ),
    )
    unix: Path | None = field(
        default=None, metadata=_help("Path of a unix socket, which only the user who runs the store may open.")
    )
    http_listen: str | None = field(
        default=None,
        metadata=_help("host:port of the HTTP side port: /healthz, /readyz and /metrics; port 0: free."),
    )
    password: str | None = field(
        default=None,
        repr=False,
        metadata=_help("What clients must AUTH with, as the user 'default' with every right. Environment only."),
    )
    users_file: Path | None = field(
        default=None,
        metadata=_help("Users, a line each, as 'kvhearth store passwd' writes them; read again when it changes."),
    )
    insecure: bool = field(
        default=False, metadata=_help("Allow listening beyond loopback to clients that give no password.")
    )
    tls_certificate: Path | None = field(
        default=None,
        metadata=_help("PEM certificate chain: TCP clients must use TLS. Read again when it changes."),
    )
    tls_key: Path | None = field(default=None, metadata=_help("PEM private key of tls_certificate, not encrypted."))
    tls_client_ca: Path | None = field(
        default=None, metadata=_help("PEM certificates that sign those of clients; each client must then show one.")
    )
    policy: str = field(default="", metadata=_help("Which chunk leaves memory first; empty: the best by measurement."))
    max_value_bytes: int = field(
        default=0, metadata=_help("Longest value kept; 0: 64MiB or half of the capacity, whichever is less.")
    )
    max_items: int = field(
        default=0, metadata=_help("Most values held in memory; 0: one for each 2KiB of capacity, at least 1024.")
    )
    huge_pages: bool = field(default=False, metadata=_help("Take it from the huge pages of 2MiB set aside."))
    shared_memory: bool = field(
        default=True,
        metadata=_help("Let clients on the unix socket, of the same user, map the memory and copy chunks themselves."),
    )
    max_connections: int = field(
        default=256,
        metadata=_help(
            "Clients at once, each with a thread; of what one pipelines, a command and 256KiB of answers are held."
        ),
    )
    idle_timeout_seconds: float = field(default=300.0, metadata=_help("A silent client is closed after this."))
    stall_timeout_seconds: float = field(
        default=30.0, metadata=_help("A command must arrive, or its answer be taken, within this.")
    )
    disk: Path | None = field(default=None, metadata=_help("Folder of the disk tier; none: no disk tier."))
    disk_capacity_bytes: int = field(
        default=0, metadata=_help("Most bytes of files in the disk tier; needed with a disk tier.")
    )
    disk_max_files: int = field(
        default=0,
        metadata=_help("Most files in the disk tier; 0: one for each 64KiB of disk_capacity, 1Ki to 4Mi."),
    )
    disk_reserve_bytes: int | None = field(
        default=None,
        metadata=_help("Room left free on the disk tier's file system; none: 1GiB or 5% of it, whichever is less."),
    )
    object_url: str | None = field(
        default=None, metadata=_help("Object tier: s3://bucket/prefix or file:///folder; none: no object tier.")
    )
    object_endpoint: str | None = field(
        default=None,
        metadata=_help("http(s)://host:port of an S3 service other than AWS: Ceph RGW, SeaweedFS, MinIO."),
    )
    object_region: str | None = field(default=None, metadata=_help("Region of the bucket; none: the environment's."))
    object_timeout_seconds: float = field(
        default=5.0, metadata=_help("An object not read or written within this is given up.")
    )
    object_capacity_bytes: int = field(
        default=0, metadata=_help("Most bytes of objects under object_url, of all nodes together; 0: no bound.")
    )
    write_mode: str = field(
        default="back", metadata=_help("When chunks go to the lower tiers: 'back' on eviction, or 'through' at once.")
    )
    min_sights: int = field(
        default=1, metadata=_help("A chunk goes to the lower tiers from its n-th sight on; 1: at once.")
    )
    default_ttl_seconds: float = field(
        default=0.0, metadata=_help("Life of a value put without one of its own; 0: until it is evicted.")
    )
    namespace_quota_bytes: int = field(
        default=0, metadata=_help("Memory that one namespace may take, as a size or as N% of the capacity; 0: all.")
    )
    group_quota_bytes: int = field(
        default=0, metadata=_help("Memory that one sharing group may take, as a size or as N% of the capacity; 0: all.")
    )
    quotas: Mapping[str, int] = field(
        default_factory=dict,
        metadata=_help("Namespace or group (8 hexadecimal digits) to its own quota, a size or N%. In the YAML file."),
    )
    read_ahead: bool = field(
        default=True, metadata=_help("Lift the rest of a chain to memory when its beginning is read from a lower tier.")
    )

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
        self._check_numbers()
        self._check_policy()
        self._check_tiers()
        self._check_quotas()
        self._check_secrets()
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
    def http_address(self) -> Address | None:
        """``http_listen``, parsed."""
        return parse_address(self.http_listen, where="http_listen") if self.http_listen is not None else None

    @property
    def needs_login(self) -> bool:
        """Whether clients must say who they are."""
        return self.password is not None or self.users_file is not None

    def _check_numbers(self) -> None:
        for name, least in (
            ("max_items", 0),
            ("max_connections", 1),
            ("disk_capacity_bytes", 0),
            ("disk_max_files", 0),
            ("disk_reserve_bytes", 0),
            ("object_capacity_bytes", 0),
            ("min_sights", 1),
            ("namespace_quota_bytes", 0),
            ("group_quota_bytes", 0),
        ):
            if (getattr(self, name) or 0) < least:
                raise _out_of_range(name, getattr(self, name), "too few", f"give at least {least}")
        for name in ("idle_timeout_seconds", "stall_timeout_seconds", "object_timeout_seconds"):
            if not 0 < getattr(self, name) <= 86_400:
                raise _out_of_range(name, getattr(self, name), "out of range", "give 0 < seconds <= 86400")
        if not 0 <= self.default_ttl_seconds <= _LONGEST_TTL_SECONDS:
            remedy = f"give 0 (none) to {_LONGEST_TTL_SECONDS} seconds"
            raise _out_of_range("default_ttl_seconds", self.default_ttl_seconds, "out of range", remedy)

    def _check_policy(self) -> None:
        from kvhearth.store.policies import DEFAULT_POLICY, POLICY_NAMES  # numpy, which clients do without

        if not self.policy:
            object.__setattr__(self, "policy", DEFAULT_POLICY)
        _check_word("policy", self.policy, POLICY_NAMES)

    def _check_tiers(self) -> None:
        _check_word("write_mode", self.write_mode, WRITE_MODES)
        if self.disk is not None and not self.disk_capacity_bytes:
            raise UserError("a disk tier has a bound", where="disk_capacity", remedy="say how much it may take: 200GiB")
        if self.default_ttl_seconds and (self.disk is not None or self.object_url is not None):
            raise UserError(
                "values with an end stay in memory, so nothing would ever go to the lower tiers",
                where="default_ttl_seconds",
                remedy="leave it out, or give no disk and no object_url",
            )
        if self.object_url is not None and not self.object_url.startswith(("s3://", "file://")):
            raise UserError(
                f"{self.object_url!r} is not the address of an object store",
                where="object_url",
                remedy="write s3://bucket/prefix or file:///folder",
            )
        for name in ("object_endpoint", "object_region"):
            if getattr(self, name) is not None and not (self.object_url or "").startswith("s3://"):
                raise UserError("set without a bucket", where=name, remedy="set object_url to s3://bucket/prefix too")
        if self.object_endpoint is not None and not self.object_endpoint.startswith(("http://", "https://")):
            raise UserError(
                f"{self.object_endpoint!r} is not a URL", where="object_endpoint", remedy="write http(s)://host:port"
            )

    def _check_quotas(self) -> None:
        for name, nbytes in self.quotas.items():
            if not name or nbytes <= 0:
                remedy = "give a namespace or a group, and more than 0 bytes"
                raise UserError(f"{name!r} with {nbytes} bytes", where="quotas", remedy=remedy)

    def _check_secrets(self) -> None:
        if self.password is not None and not self.password:
            raise UserError("the password is empty", where="password", remedy="set a longer one, or none at all")
        if self.password is not None and self.users_file is not None:
            raise UserError(
                "there are both a users file and a password",
                where="users_file",
                remedy="unset KVHEARTH_STORE_PASSWORD and password_file, or give no users file",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_certificate"
            raise UserError("a certificate and its key go together", where=missing, remedy="give both, or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise UserError(
                "clients' certificates need TLS", where="tls_client_ca", remedy="give tls_certificate and tls_key too"
            )
        if self.tls_certificate is not None and self.listen is None:
            raise UserError("TLS is for TCP only", where="tls_certificate", remedy="set listen, or give no certificate")

    def _check_exposure(self) -> None:
        listen, http, unix = self.listen_address, self.http_address, self.unix_address
        for where, address in (("listen", listen), ("http_listen", http)):
            if address is None:
                continue
            if address.is_unix:
                raise UserError(
                    f"{address} is not a TCP address", where=where, remedy="name the socket file under unix"
                )
            if not (address.is_loopback or self.needs_login or self.insecure):
                raise UserError(
                    f"{address} can be reached from other machines and there is no password",
                    where=where,
                    remedy="set users_file, password_file or KVHEARTH_STORE_PASSWORD; or listen on 127.0.0.1; "
                    "or, where the network itself keeps others out, set insecure",
                )
        if unix is not None and not unix.is_unix:
            raise UserError(f"{self.unix} is not a path", where="unix", remedy="give the path of a socket file")


def setting_name(field_name: str) -> str:
    """What a setting is called where people write it: sizes there carry their unit (``capacity: 64GiB``)."""
    return field_name.removesuffix("_bytes")


def _out_of_range(field_name: str, value: Any, fault: str, remedy: str) -> UserError:
    return UserError(f"{value} is {fault}", where=setting_name(field_name), remedy=remedy)


def _check_word(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise UserError(f"{value!r} is not known", where=name, remedy=f"one of {', '.join(words)}")
