"""The HTTP port beside the store: /health and /metrics, for loopback scrapers. Not a way to reach values."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvhearth.errors import UserError
from kvhearth.metrics import Registry
from kvhearth.metrics.registry import CONTENT_TYPE
from kvhearth.store.address import Address

_MAX_REQUESTS = 8
_REQUEST_SECONDS = 5.0


class Sidecar:
    """An HTTP server on its own threads.

    Args:
        address: loopback address; port 0 takes any free port.
        registry: what /metrics shows.

    Raises:
        UserError: the address is taken or cannot be used.
    """

    def __init__(self, address: Address, registry: Registry) -> None:
        try:
            self._http = _BoundedServer(address, registry)
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            raise UserError(
                f"{address} is already in use" if busy else f"cannot listen on {address}: {error.strerror}",
                where="metrics_listen",
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

    def __init__(self, address: Address, registry: Registry) -> None:
        self.registry = registry
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
        if path == "/health":
            self._answer(200, "application/json", b'{"status": "ok"}\n')
        elif path == "/metrics":
            self._answer(200, CONTENT_TYPE, self.server.registry.expose())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"not found: try /health or /metrics\n")

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
