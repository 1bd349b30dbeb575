"""The store's server: listeners, a bounded thread a connection, the watchdog that cuts stalled ones, start and stop."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable

from kvhearth.metrics import MetricFamily, Registry
from kvhearth.metrics import store as m
from kvhearth.store.address import Address, Listener
from kvhearth.store.config import StoreConfig
from kvhearth.store.connection import Connection
from kvhearth.store.introspection import REDIS_VERSION
from kvhearth.store.memory import Progress
from kvhearth.store.session import Counts
from kvhearth.store.sidecar import Sidecar
from kvhearth.store.table import Table

_JOIN_SECONDS = 5.0
_TOO_MANY = b"-ERR max number of clients reached\r\n"


class StoreServer:
    """A store, in this process.

    Args:
        config: where to listen and every bound.
        progress: called with (bytes faulted in, bytes in all) while `start` takes its memory.
    """

    def __init__(self, config: StoreConfig, progress: Progress | None = None) -> None:
        self._config = config
        self._progress = progress
        self._listeners: list[Listener] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._ids = itertools.count(1)
        self._stopping = threading.Event()
        self._closed = Counts()
        self._admitted = 0
        self._opened = 0
        self._refused = 0
        self._cut: dict[str, int] = {}
        self._sidecar: Sidecar | None = None
        self._started_at = 0.0
        self.registry = Registry()
        self.registry.collect_from(self._metrics)

    def start(self) -> StoreServer:
        """Bind, take and fault in the memory, then let clients in. Returns once it is ready.

        Raises:
            UserError: an address is taken, or the memory cannot be had; nothing is left behind.
        """
        config = self._config
        try:
            for address, where in ((config.listen_address, "listen"), (config.unix_address, "unix")):
                if address is not None:
                    self._listeners.append(Listener(address, where=where))
            if config.metrics_address is not None:
                self._sidecar = Sidecar(config.metrics_address, self.registry)
            self._table = Table(config.capacity_bytes, config.item_limit, self._progress)
        except BaseException:
            self._stopping.set()
            self._close_listeners()
            raise
        self._started_at = time.monotonic()
        for listener in self._listeners:
            listener.open()
            self._spawn(lambda listener=listener: self._accept(listener), f"kvhearth-store-accept-{listener.address}")
        self._spawn(self._watch, "kvhearth-store-watchdog")
        if self._sidecar is not None:
            self._sidecar.start()
        return self

    def stop(self) -> None:
        """Turn clients away, cut the connected ones, and give the memory back. Safe to call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._close_listeners()
        give_up = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        with self._lock:
            clients = list(self._connections.values())
            for connection in self._connections:
                connection.cut("shutdown")
        for thread in clients:
            thread.join(max(0.0, give_up - time.monotonic()))
        if not any(thread.is_alive() for thread in clients):
            self._table.close()

    def __enter__(self) -> StoreServer:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The first address clients can use, as `parse_address` reads it."""
        return str(self._listeners[0].address)

    @property
    def addresses(self) -> list[Address]:
        """Every address clients can use."""
        return [listener.address for listener in self._listeners]

    @property
    def metrics_address(self) -> Address | None:
        """Where /health and /metrics are served, if anywhere."""
        return self._sidecar.address if self._sidecar is not None else None

    @property
    def table(self) -> Table:
        """The values (for figures and tests)."""
        return self._table

    def _spawn(self, target: object, name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._sidecar is not None:
            self._sidecar.stop()

    def _accept(self, listener: Listener) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = listener.sock.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._stopping.wait(0.1)  # out of descriptors: try again, do not spin
                elif error.errno not in (errno.ECONNABORTED, errno.EINTR):
                    return
                continue
            try:
                self._welcome(sock)
            except (OSError, RuntimeError):  # the client left already, or there is no thread to be had
                sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        if not self._admit():
            sock.settimeout(0.1)
            with contextlib.suppress(OSError):
                sock.sendall(_TOO_MANY)
            sock.close()
            return
        try:
            self._start_client(sock)
        except BaseException:
            with self._lock:
                self._admitted -= 1
            raise

    def _admit(self) -> bool:
        with self._lock:
            if self._admitted >= self._config.max_connections or self._stopping.is_set():
                self._refused += 1
                return False
            self._admitted += 1
            return True

    def _start_client(self, sock: socket.socket) -> None:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(
            sock,
            client_id=next(self._ids),
            peer=_peer_of(sock),
            config=self._config,
            table=self._table,
            info=self._info,
        )
        thread = threading.Thread(target=self._serve, args=(connection,), name="kvhearth-store-client", daemon=True)
        with self._lock:
            thread.start()
            self._connections[connection] = thread
            self._opened += 1

    def _serve(self, connection: Connection) -> None:
        try:
            connection.serve()
        finally:
            with self._lock:
                self._admitted -= 1
                del self._connections[connection]
                self._closed.add(connection.session.counts)
                if connection.cut_reason:
                    self._cut[connection.cut_reason] = self._cut.get(connection.cut_reason, 0) + 1

    def _watch(self) -> None:
        shortest = min(self._config.idle_timeout_seconds, self._config.stall_timeout_seconds)
        while not self._stopping.wait(min(1.0, shortest / 4)):
            with self._lock:
                connections = list(self._connections)
            now = time.monotonic()
            for connection in connections:
                reason = connection.overdue(now)
                if reason is not None:
                    connection.cut(reason)

    def _totals(self) -> Counts:
        totals = Counts()
        with self._lock:
            totals.add(self._closed)
            for connection in self._connections:
                totals.add(connection.session.counts)
        return totals

    def _metrics(self) -> Iterable[MetricFamily]:
        totals, stats = self._totals(), self._table.stats()
        with self._lock:
            cut = [((reason,), float(number)) for reason, number in self._cut.items()]
        yield MetricFamily(m.COMMANDS, [(key, float(number)) for key, number in totals.commands.items()])
        yield MetricFamily(m.CONNECTIONS_CUT, cut)
        groups = self._table.groups().items()
        yield MetricFamily(m.GROUP_BYTES, [((name,), float(share.value_bytes)) for name, share in groups])
        yield MetricFamily(m.GROUP_VALUES, [((name,), float(share.values)) for name, share in groups])
        for metric, number in (
            (m.RECEIVED, totals.received_bytes),
            (m.SENT, totals.sent_bytes),
            (m.HITS, totals.hits),
            (m.MISSES, totals.misses),
            (m.ITEMS, stats.items),
            (m.VALUES, stats.value_bytes),
            (m.USED, stats.used_bytes),
            (m.PINNED, stats.pinned_bytes),
            (m.CAPACITY, stats.capacity_bytes),
            (m.EVICTIONS, stats.evictions),
            (m.REFUSED_UPLOADS, stats.refused_uploads),
            (m.CONNECTIONS, len(self._connections)),
            (m.CONNECTIONS_OPENED, self._opened),
            (m.CONNECTIONS_REFUSED, self._refused),
        ):
            yield MetricFamily(metric, [((), float(number))])

    def _info(self) -> dict[str, dict[str, str]]:
        totals, stats = self._totals(), self._table.stats()
        port = next((listener.address.port for listener in self._listeners if not listener.address.is_unix), 0)
        sections: dict[str, dict[str, object]] = {
            "Server": {
                "redis_version": REDIS_VERSION,
                "redis_mode": "standalone",
                "server_name": "kvhearth",
                "process_id": os.getpid(),
                "tcp_port": port,
                "uptime_in_seconds": int(time.monotonic() - self._started_at),
            },
            "Clients": {"connected_clients": len(self._connections), "maxclients": self._config.max_connections},
            "Memory": {
                "used_memory": stats.used_bytes,
                "maxmemory": stats.capacity_bytes,
                "maxmemory_policy": "allkeys-lru",
                "value_bytes": stats.value_bytes,
                "uploading_bytes": stats.uploading_bytes,
                "pinned_bytes": stats.pinned_bytes,
                "max_pinned_bytes": self._table.max_pinned_bytes,
                "max_value_bytes": self._config.value_limit_bytes,
            },
            "Stats": {
                "total_connections_received": self._opened,
                "rejected_connections": self._refused,
                "total_commands_processed": sum(totals.commands.values()),
                "total_net_input_bytes": totals.received_bytes,
                "total_net_output_bytes": totals.sent_bytes,
                "keyspace_hits": totals.hits,
                "keyspace_misses": totals.misses,
                "evicted_keys": stats.evictions,
                "refused_uploads": stats.refused_uploads,
            },
            "Groups": {
                f"group_{name}": f"bytes={share.value_bytes},values={share.values}"
                for name, share in self._table.groups().items()
            },
            "Keyspace": {"db0": f"keys={stats.items},expires=0,avg_ttl=0"} if stats.items else {},
        }
        return {title: {name: str(value) for name, value in lines.items()} for title, lines in sections.items()}


def _peer_of(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return f"unix:pid={struct.unpack('3i', raw)[0]}"
    host, port = sock.getpeername()[:2]
    return str(Address(host=host, port=port))
