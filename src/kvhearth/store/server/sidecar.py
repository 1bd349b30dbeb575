"""The HTTP port beside the store: /healthz, /readyz and /metrics. Not a way to reach keys or values.

It asks nobody for a password: the probes of a kubelet come from the node's address and, like most scrapers, carry none.
What it shows are figures and the names of tiers and of groups (digests). So it may listen beyond loopback wherever the
store itself may: with users or a password, or with ``insecure`` (`StoreConfig` checks that). Who may reach the port
there is the network's business.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from kvhearth.errors import UserError
from kvhearth.metrics import Registry
from kvhearth.metrics.registry import CONTENT_TYPE
from kvhearth.store.protocol.address import Address

_MAX_REQUESTS = 8
_REQUEST_SECONDS = 5.0


class Readiness(NamedTuple):
    """What /readyz says. A tier that is down leaves the store ready: it is served without."""

    ready: bool
    """The memory is there and clients are let in."""
    tiers: Mapping[str, str] = {}
    """Tier's name to ``up``, ``rebuilding`` or ``down``."""


class Sidecar:
    """An HTTP server on its own threads. Start it first of all: /healthz and /readyz also tell of a store that is still
    taking its memory.

    Args:
        address: where; port 0 takes any free port.
        registry: what /metrics shows.
        readiness: what /readyz says; called on this server's threads.

    Raises:
        UserError: the address is taken or cannot be used.
    """

    def __init__(self, address: Address, registry: Registry, readiness: Callable[[], Readiness]) -> None:
        try:
            self._http = _BoundedServer(address, registry, readiness)
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            raise UserError(
                f"{address} is already in use" if busy else f"cannot listen on {address}: {error.strerror}",
                where="http_listen",
                remedy="stop the process that has it or choose another",
            ) from None
        self.address = address._replace(port=self._http.server_address[1])
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="kvhearth-store-metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join(_REQUEST_SECONDS)
        self._http.server_close()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Address, registry: Registry, readiness: Callable[[], Readiness]) -> None:
        self.registry = registry
        self.readiness = readiness
        self._slots = threading.BoundedSemaphore(_MAX_REQUESTS)
        if ":" in address.host:
            self.address_family = socket.AF_INET6
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread to be had
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _BoundedServer

    def handle(self) -> None:
        # `timeout` is for each wait; a client that sends drop by drop would have its slot for as long as it likes.
        cut = threading.Timer(_REQUEST_SECONDS, _cut, (self.connection,))
        cut.daemon = True
        cut.start()
        try:
            super().handle()
        finally:
            cut.cancel()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path == "/healthz":
            self._answer_json(200, {"status": "ok"})
        elif path == "/readyz":
            ready, tiers = self.server.readiness()
            self._answer_json(200 if ready else 503, {"status": "ready" if ready else "starting", "tiers": {**tiers}})
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.registry.expose())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found: try /healthz, /readyz or /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer_json(self, status: int, body: Mapping[str, Any]) -> None:
        self._answer(status, "application/json", json.dumps(body).encode() + b"\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
