"""What a server tells of itself: INFO for Redis's tools, KV.STATS in JSON, and metrics for a scrape, all from the same
numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store as m
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.introspection import REDIS_VERSION
from kvhearth.store.server.session import Counts
from kvhearth.store.server.tiered import Tiered


class Totals(NamedTuple):
    """Figures of all connections, those that are closed included."""

    counts: Counts
    open: int
    opened: int
    refused: int
    cut: dict[str, int]


class ServerFigures:
    """Makes them when asked.

    Args:
        totals: the connections' figures as of now.
        port: the TCP port, 0 for none.
    """

    def __init__(self, config: StoreConfig, store: Tiered, totals: Callable[[], Totals], port: int) -> None:
        self._config = config
        self._store = store
        self._totals = totals
        self._port = port
        self._started_at = time.monotonic()

    def stats(self) -> dict[str, Any]:
        """For KV.STATS: sizes in bytes, times in seconds."""
        totals, table = self._totals(), self._store.table
        dram = table.stats()
        return {
            "uptime_seconds": round(time.monotonic() - self._started_at, 3),
            "boot_id": table.events.boot_id,
            "policy": self._config.policy,
            "connections": {"open": totals.open, "opened": totals.opened, "refused": totals.refused, "cut": totals.cut},
            "commands": sum(totals.counts.commands.values()),
            "hits": totals.counts.hits,
            "misses": totals.counts.misses,
            "received_bytes": totals.counts.received_bytes,
            "sent_bytes": totals.counts.sent_bytes,
            "dram": {**dram._asdict(), "lent_bytes": self._store.lent.taken_bytes},
            "tiers": {tier.name: _plain(tier.stats()._asdict()) for tier in self._store.tiers},
            "events": {"sequence": table.events.last, "followers": table.events.followers},
            "namespaces": {name: share._asdict() for name, share in table.namespaces().items()},
            "groups": {name: share._asdict() for name, share in table.groups().items()},
        }

    def info(self) -> dict[str, dict[str, str]]:
        """For INFO: the sections that Redis's tools look at, and ours."""
        totals, table = self._totals(), self._store.table
        stats, items = table.stats(), self._store.count()
        sections: dict[str, dict[str, object]] = {
            "Server": {
                "redis_version": REDIS_VERSION,
                "redis_mode": "standalone",
                "server_name": "kvhearth",
                "process_id": os.getpid(),
                "tcp_port": self._port,
                "uptime_in_seconds": int(time.monotonic() - self._started_at),
            },
            "Clients": {"connected_clients": totals.open, "maxclients": self._config.max_connections},
            "Memory": {
                "used_memory": stats.used_bytes,
                "maxmemory": stats.capacity_bytes,
                "maxmemory_policy": self._config.policy,
                "value_bytes": stats.value_bytes,
                "uploading_bytes": stats.uploading_bytes,
                "pinned_bytes": stats.pinned_bytes,
                "max_pinned_bytes": table.max_pinned_bytes,
                "max_value_bytes": self._config.value_limit_bytes,
            },
            "Stats": {
                "total_connections_received": totals.opened,
                "rejected_connections": totals.refused,
                "total_commands_processed": sum(totals.counts.commands.values()),
                "total_net_input_bytes": totals.counts.received_bytes,
                "total_net_output_bytes": totals.counts.sent_bytes,
                "keyspace_hits": totals.counts.hits,
                "keyspace_misses": totals.counts.misses,
                "evicted_keys": stats.evictions,
                "expired_keys": stats.expirations,
                "refused_uploads": stats.refused_uploads,
            },
            "Tiers": {
                f"tier_{tier.name}": f"items={t.items},bytes={t.stored_bytes},max_bytes={t.capacity_bytes},"
                f"up={int(not t.is_down)},ready={int(t.ready)}"
                for tier in self._store.tiers
                for t in (tier.stats(),)
            },
            "Namespaces": {
                f"namespace_{name}": f"bytes={share.value_bytes},values={share.values}"
                for name, share in table.namespaces().items()
            },
            "Groups": {
                f"group_{name}": f"bytes={share.value_bytes},values={share.values}"
                for name, share in table.groups().items()
            },
            "Keyspace": {"db0": f"keys={items},expires=0,avg_ttl=0"} if items else {},
        }
        return {title: {name: str(value) for name, value in lines.items()} for title, lines in sections.items()}

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        totals, table = self._totals(), self._store.table
        stats = table.stats()
        commands = [(key, float(number)) for key, number in totals.counts.commands.items()]
        yield MetricFamily(m.COMMANDS, commands)
        yield MetricFamily(m.CONNECTIONS_CUT, [((reason,), float(number)) for reason, number in totals.cut.items()])
        for shares, size, values in (
            (table.groups(), m.GROUP_BYTES, m.GROUP_VALUES),
            (table.namespaces(), m.NAMESPACE_BYTES, m.NAMESPACE_VALUES),
        ):
            yield MetricFamily(size, [((name,), float(share.value_bytes)) for name, share in shares.items()])
            yield MetricFamily(values, [((name,), float(share.values)) for name, share in shares.items()])
        for metric, number in (
            (m.RECEIVED, totals.counts.received_bytes),
            (m.SENT, totals.counts.sent_bytes),
            (m.HITS, totals.counts.hits),
            (m.MISSES, totals.counts.misses),
            (m.ITEMS, stats.items),
            (m.VALUES, stats.value_bytes),
            (m.USED, stats.used_bytes),
            (m.PINNED, stats.pinned_bytes),
            (m.LENT, self._store.lent.taken_bytes),
            (m.CAPACITY, stats.capacity_bytes),
            (m.EVICTIONS, stats.evictions),
            (m.EXPIRATIONS, stats.expirations),
            (m.REFUSED_UPLOADS, stats.refused_uploads),
            (m.CONNECTIONS, totals.open),
            (m.CONNECTIONS_OPENED, totals.opened),
            (m.CONNECTIONS_REFUSED, totals.refused),
            (m.EVENT_FOLLOWERS, table.events.followers),
        ):
            yield MetricFamily(metric, [((), float(number))])
        yield from self._store.metrics()


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, (int, float, bool)) else dict(value) for name, value in fields.items()}
