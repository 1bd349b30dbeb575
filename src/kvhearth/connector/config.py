"""What the connector is told through ``kv_connector_extra_config``: the tier's settings and the admission rules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.store.open import members_of
from kvhearth.store.protocol.address import Address, parse_address
from kvhearth.store.protocol.tls import TlsSettings
from kvhearth.units import parse_bytes

PASSWORD_VARIABLE = "KVHEARTH_STORE_PASSWORD"  # noqa: S105 - a variable's name
DRAM_ADMISSIONS = ("eager", "lazy")
STORE_ADMISSIONS = ("always", "second-sight")
_TLS = ("tls_ca", "tls_server_name", "tls_certificate", "tls_key")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Settings of a `StoreTier`.

    Args:
        address: the store: ``host:port`` or ``unix:/path``; or a ring of them: several with commas between,
            ``file:/path`` with a node a line, or ``dns:name:port``.
        copies: nodes of a ring that keep each chunk, 1 or 2.
        shared_memory: copy chunks out of and into the store's memory, where the address is a unix socket.
        user: who to log in as, where the environment has a password (``KVHEARTH_STORE_PASSWORD``).
        tls_ca: PEM certificates of the authorities to trust; a path here or in ``tls_server_name`` means TLS.
        tls_server_name: the name in the server's certificate, if not its host.
        tls_certificate, tls_key: PEM files to show to a store that asks for them.
        pool: engines of one pool expect to share; one that cannot is told which field differs.
        store_admission: ``always``, or ``second-sight``: a chunk goes to the store when a second request needs it.
        lookup_timeout_seconds: a lookup without an answer by then is a miss.
        load_timeout_seconds: a batch of chunks that has not come by then is computed again.
        put_timeout_seconds: a batch of chunks that could not be put by then is given up.
        connections: connections that load at once.
        max_put_bytes: KV that may wait in DRAM to be put (or "256MiB"); beyond it, tails of chains are dropped.
        weights: names the weights when they cannot be told from files (a remote loader), else empty.
        epoch: starts the weights epoch; all engines that serve the same weights give the same.

    Raises:
        UserError: naming the field and the remedy.
    """

    address: str
    copies: int = 1
    shared_memory: bool = True
    user: str = "default"
    tls_ca: str = ""
    tls_server_name: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    pool: str = ""
    store_admission: str = "always"
    lookup_timeout_seconds: float = 0.05
    load_timeout_seconds: float = 2.0
    put_timeout_seconds: float = 2.0
    connections: int = 2
    max_put_bytes: int = 256 << 20
    weights: str = ""
    epoch: str = ""

    def __post_init__(self) -> None:
        members_of(self.address, self.copies, where=_at("address"))
        _one_of("store_admission", self.store_admission, STORE_ADMISSIONS)
        if not isinstance(self.shared_memory, bool):
            raise _wrong("shared_memory", self.shared_memory, "give true or false")
        for name in ("lookup_timeout_seconds", "load_timeout_seconds", "put_timeout_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 60:
                raise _wrong(name, value, "give seconds, more than 0 and at most 60")
        if isinstance(self.connections, bool) or not isinstance(self.connections, int):
            raise _wrong("connections", self.connections, "give a number of connections")
        if not 1 <= self.connections <= 16:
            raise _wrong("connections", self.connections, "give 1 to 16")
        if isinstance(self.max_put_bytes, bool) or not isinstance(self.max_put_bytes, int) or self.max_put_bytes <= 0:
            raise _wrong("max_put_bytes", self.max_put_bytes, "give a size such as 256MiB")
        for name in ("pool", "weights", "epoch", "user", *_TLS):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > 200 or not value.isprintable():
                raise _wrong(name, value, "give printable characters, at most 200 bytes")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TierConfig:
        """Read the keys of a ``secondary_tiers`` entry."""
        known = {field.name for field in fields(cls)}
        for name in given:
            if name not in known:
                raise UserError("unknown setting", where=_at(name), remedy=f"known are {', '.join(sorted(known))}")
        if "address" not in given:
            raise UserError(
                "missing", where=_at("address"), remedy="give the store's host:port or unix:/path, or a ring"
            )
        values = dict(given)
        if not isinstance(values["address"], str):
            raise _wrong("address", values["address"], "give host:port or unix:/path")
        if isinstance(values.get("max_put_bytes"), str):
            values["max_put_bytes"] = parse_bytes(values["max_put_bytes"], where=_at("max_put_bytes"))
        return cls(**values)

    @property
    def password(self) -> str | None:
        """The store's password, from the environment; never part of the settings, which vLLM logs."""
        return os.environ.get(PASSWORD_VARIABLE) or None

    @property
    def tls(self) -> TlsSettings | None:
        """For the store's client; None: no TLS."""
        ca, certificate, key = (
            Path(value) if value else None for value in (self.tls_ca, self.tls_certificate, self.tls_key)
        )
        if ca is None and certificate is None and not self.tls_server_name:
            return None
        return TlsSettings(ca, certificate, key, self.tls_server_name or None)


def dram_admission(extra_config: Mapping[str, Any]) -> str:
    """``eager`` or ``lazy``. Raises UserError for anything else."""
    value = extra_config.get("dram_admission", "eager")
    _one_of("dram_admission", value, DRAM_ADMISSIONS, where="kv_connector_extra_config.dram_admission")
    return str(value)


def snapshot_listen(extra_config: Mapping[str, Any], *, rank: int) -> Address | None:
    """Where the engine serves its snapshot, each data-parallel rank at a port of its own (the given one plus the rank);
    None: nowhere. Raises UserError for anything but host:port."""
    given = extra_config.get("snapshot_listen")
    if given is None:
        return None
    where = "kv_connector_extra_config.snapshot_listen"
    address = parse_address(str(given), where=where)
    if address.is_unix or address.port + rank > 65_535:
        raise UserError(f"{given!r} with rank {rank}", where=where, remedy="give host:port")
    return address._replace(port=address.port + rank if address.port else 0)


def _at(name: str) -> str:
    return f"kv_connector_extra_config.secondary_tiers[kvhearth].{name}"


def _wrong(name: str, value: Any, remedy: str) -> UserError:
    return UserError(f"{value!r}", where=_at(name), remedy=remedy)


def _one_of(name: str, value: Any, allowed: tuple[str, ...], *, where: str = "") -> None:
    if value not in allowed:
        raise UserError(f"{value!r}", where=where or _at(name), remedy=f"choose {' or '.join(allowed)}")
