"""From settings to the parts of a server: who may log in, TLS, the rules of the table, the lower tiers."""

from __future__ import annotations

import re

from kvhearth.store.dram.pool import Progress
from kvhearth.store.dram.rules import Rules
from kvhearth.store.dram.table import Table
from kvhearth.store.protocol.tls import ServerTls, TlsSettings
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.tiered import Tiered
from kvhearth.store.server.users import Users
from kvhearth.store.tiers.bucket import S3Access
from kvhearth.store.tiers.disk import DiskTier
from kvhearth.store.tiers.objects import ObjectTier
from kvhearth.store.tiers.port import Tier

_READ_SECONDS = 1.0
"""Longest wait for a value from disk, where no object tier is slower."""
_GROUP = re.compile(r"[0-9a-f]{8}")


def users_of(config: StoreConfig) -> Users | None:
    """Who may log in; None: nobody has to.

    Raises:
        UserError: the users file cannot be used.
    """
    if config.users_file is not None:
        return Users.of_file(config.users_file)
    return Users.of_password(config.password) if config.password is not None else None


def tls_of(config: StoreConfig) -> ServerTls | None:
    """TLS for TCP clients; None for none.

    Raises:
        UserError: a file cannot be used.
    """
    if config.tls_certificate is None:
        return None
    return ServerTls(TlsSettings(config.tls_client_ca, config.tls_certificate, config.tls_key))


def store_of(config: StoreConfig, progress: Progress | None) -> Tiered:
    """The values over all tiers, not started. The memory is taken here.

    Raises:
        UserError: there is not that much, or a tier's place cannot be used.
    """
    quotas: dict[bytes | int, int] = {
        int(name, 16) if _GROUP.fullmatch(name) else name.encode(): nbytes for name, nbytes in config.quotas.items()
    }
    rules = Rules(
        policy=config.policy,
        ttl_seconds=config.default_ttl_seconds,
        namespace_quota_bytes=config.namespace_quota_bytes,
        group_quota_bytes=config.group_quota_bytes,
        quotas=quotas,
    )
    tiers = _tiers_of(config)
    try:
        table = Table(config.capacity_bytes, config.item_limit, progress, rules=rules, huge_pages=config.huge_pages)
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return Tiered(
        table,
        tiers,
        write_through=config.write_mode == "through",
        min_sights=config.min_sights,
        read_seconds=_READ_SECONDS if config.object_url is None else max(_READ_SECONDS, config.object_timeout_seconds),
        read_ahead=config.read_ahead,
    )


def _tiers_of(config: StoreConfig) -> list[Tier]:
    tiers: list[Tier] = []
    if config.disk is not None:
        tiers.append(
            DiskTier(
                config.disk,
                config.disk_capacity_bytes,
                config.disk_max_files,
                policy=config.policy,
                reserve_bytes=config.disk_reserve_bytes,
            )
        )
    if config.object_url is not None:
        try:
            tiers.append(_object_tier(config, config.object_url))
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
    return tiers


def _object_tier(config: StoreConfig, url: str) -> Tier:
    return ObjectTier(
        url,
        access=S3Access(endpoint=config.object_endpoint, region=config.object_region),
        max_bytes=config.object_capacity_bytes,
        timeout_seconds=config.object_timeout_seconds,
    )
