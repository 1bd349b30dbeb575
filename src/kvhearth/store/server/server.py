"""The store's server: listeners, a bounded thread a connection, the watchdog that cuts stalled ones, start and stop."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from functools import partial

from kvhearth.metrics import Registry
from kvhearth.store.dram.pool import Progress
from kvhearth.store.protocol.address import Address, Listener
from kvhearth.store.protocol.tls import ServerTls
from kvhearth.store.protocol.tls_socket import TlsSocket
from kvhearth.store.server.assemble import store_of, tls_of, users_of
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.connection import Connection
from kvhearth.store.server.figures import ServerFigures, Totals
from kvhearth.store.server.session import Counts
from kvhearth.store.server.sidecar import Readiness, Sidecar
from kvhearth.store.server.tiered import Tiered
from kvhearth.store.server.users import Users

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 5.0
_FLUSH_SECONDS = 10.0
_HANDSHAKE_SECONDS = 5.0
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
        self._ready = False
        self._users: Users | None = None
        self._tls: ServerTls | None = None
        self.registry = Registry()

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
            if config.http_address is not None:
                self._sidecar = Sidecar(config.http_address, self.registry, self._readiness)
                self._sidecar.start()
            self._users = users_of(config)
            self._tls = tls_of(config)
            self._store = store_of(config, self._progress)
            self._store.start()
        except BaseException:
            self._stopping.set()
            self._close_listeners()
            raise
        port = next((address.port for address in self.addresses if not address.is_unix), 0)
        self._figures = ServerFigures(config, self._store, self._totals, port)
        self.registry.collect_from(self._figures.metrics)
        if self._users is not None:
            self.registry.collect_from(self._users.metrics)
        if self._tls is not None:
            self.registry.collect_from(self._tls.metrics)
        for listener in self._listeners:
            listener.open()
            name = f"kvhearth-store-accept-{listener.address}"
            self._spawn(partial(self._accept, listener), name)
        self._spawn(self._watch, "kvhearth-store-watchdog")
        self._ready = True
        return self

    def stop(self) -> None:
        """Turn clients away, cut the connected ones, and give the memory back. Safe to call twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._ready = False
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
        self._store.close(_FLUSH_SECONDS if self._store.tiers else 0.0)
        if not any(thread.is_alive() for thread in clients):
            self._store.table.close()

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
    def http_address(self) -> Address | None:
        """Where /healthz, /readyz and /metrics are served, if anywhere."""
        return self._sidecar.address if self._sidecar is not None else None

    @property
    def store(self) -> Tiered:
        """The values (for figures and tests)."""
        return self._store

    def _readiness(self) -> Readiness:
        if not self._ready:
            return Readiness(False)
        tiers = {"dram": "up"}
        for tier in self._store.tiers:
            tiers[tier.name] = "down" if tier.is_down else "up" if tier.ready else "rebuilding"
        return Readiness(True, tiers)

    def _spawn(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
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
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a follower that is gone says nothing
            threading.Thread(target=self._serve, args=(sock,), name="kvhearth-store-client", daemon=True).start()
        except BaseException:
            self._leave()
            raise

    def _admit(self) -> bool:
        with self._lock:
            if self._admitted >= self._config.max_connections or self._stopping.is_set():
                self._refused += 1
                return False
            self._admitted += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._admitted -= 1

    def _serve(self, sock: socket.socket) -> None:
        try:
            connection = self._connect(sock)
            if connection is not None:
                self._serve_connection(connection)
        finally:
            self._leave()

    def _connect(self, sock: socket.socket) -> Connection | None:
        talking: socket.socket | TlsSocket = sock
        try:
            peer = _peer_of(sock)
            if self._tls is not None and sock.family != socket.AF_UNIX:
                give_up = time.monotonic() + min(_HANDSHAKE_SECONDS, self._config.stall_timeout_seconds)
                talking = self._tls.wrap(sock, give_up)
        except OSError:
            sock.close()
            self._count_cut("handshake")
            return None
        return Connection(
            talking,
            client_id=next(self._ids),
            peer=peer,
            config=self._config,
            store=self._store,
            users=self._users,
            figures=self._figures,
        )

    def _serve_connection(self, connection: Connection) -> None:
        with self._lock:
            self._connections[connection] = threading.current_thread()
            self._opened += 1
        if self._stopping.is_set():
            connection.cut("shutdown")
        try:
            connection.serve()
        except Exception:
            connection.cut_reason = connection.cut_reason or "fault"
            _log.exception("a connection ended by a fault of the store's own")
        finally:
            with self._lock:
                del self._connections[connection]
                self._closed.add(connection.session.counts)
            if connection.cut_reason:
                self._count_cut(connection.cut_reason)

    def _count_cut(self, reason: str) -> None:
        with self._lock:
            self._cut[reason] = self._cut.get(reason, 0) + 1

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
            self._store.table.sweep()

    def _totals(self) -> Totals:
        totals = Counts()
        with self._lock:
            totals.add(self._closed)
            for connection in self._connections:
                totals.add(connection.session.counts)
            return Totals(totals, len(self._connections), self._opened, self._refused, dict(self._cut))


def _peer_of(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return f"unix:pid={struct.unpack('3i', raw)[0]}"
    host, port = sock.getpeername()[:2]
    return str(Address(host=host, port=port))
