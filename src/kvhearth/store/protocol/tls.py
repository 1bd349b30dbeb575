"""TLS on a store's TCP connections, on either side: contexts that follow their files, and a handshake under a deadline.
What comes out is a `TlsSocket`. Unix sockets have no need of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.metrics import MetricFamily
from kvhearth.metrics import store_safety as m
from kvhearth.store.protocol.tls_socket import TlsError, TlsSocket, tls_error

_log = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 1.0
_FAREWELL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files for TLS, for one side of a connection.

    Args:
        ca: PEM certificates that sign the other side's. Client: None takes the system's. Server: None lets clients in
            without a certificate, else each must show one.
        certificate: PEM chain that this side shows. A server needs one.
        key: its private key, PEM, not encrypted.
        server_name: client only: the name that the server's certificate must carry; None: the host of its address.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "tls_key" if self.key is None else "tls_certificate"
            raise UserError("a certificate and its key go together", where=missing, remedy="give both, or neither")


class ServerTls:
    """The server's side. Files are read again when they change; while they cannot be used, the last good ones are.

    Raises:
        UserError: a file cannot be read, is no certificate or key, or the two do not belong together.
    """

    def __init__(self, settings: TlsSettings) -> None:
        if settings.certificate is None:
            raise UserError("a server needs a certificate", where="tls_certificate", remedy="give one, and its key")
        self._files = _Files(settings, _server_context)

    @property
    def is_stale(self) -> bool:
        """Whether the files as they are now cannot be used."""
        return self._files.is_stale

    def metrics(self) -> Iterable[MetricFamily]:
        """For `Registry.collect_from`."""
        self._files.context()  # so that a scrape sees what has become of the files, whether or not clients come
        yield MetricFamily(m.TLS_STALE, [((), float(self.is_stale))])

    def wrap(self, sock: socket.socket, deadline: float) -> TlsSocket:
        """Shake hands with a client that just connected. ``sock`` is taken over, and closed when this fails.

        Args:
            deadline: monotonic seconds, for the handshake in all.

        Raises:
            TlsError: the client does not speak TLS, offers too old a version, or has no certificate that we accept.
            TimeoutError: it did not finish in time.
        """
        return _shake_hands(sock, deadline, lambda: self._files.context().wrap_socket(sock, **_LATER, server_side=True))


class ClientTls:
    """The client's side; see `ServerTls`."""

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._files = _Files(settings, _client_context)

    def context(self) -> ssl.SSLContext:
        """For asyncio, together with `server_name`: made from the files as they are now."""
        return self._files.context()

    def server_name(self, host: str) -> str:
        """The name to look for in the certificate of the server at ``host``."""
        return self._settings.server_name or host

    def wrap(self, sock: socket.socket, deadline: float, *, host: str) -> TlsSocket:
        """Shake hands with the server at ``host``. ``sock`` is taken over, and closed when this fails.

        Raises:
            TlsError: the server does not speak TLS, or its certificate is not one for this name, in date and signed
                by a known authority; ``strerror`` says which. With TLS 1.3 a server that refuses *our* certificate says
                so at the first read.
            TimeoutError: not done by ``deadline`` (monotonic seconds).
        """
        name = self.server_name(host)
        return _shake_hands(sock, deadline, lambda: self.context().wrap_socket(sock, **_LATER, server_hostname=name))


class _Files:
    """A context and the files that it was made from."""

    def __init__(self, settings: TlsSettings, make: Callable[[TlsSettings], ssl.SSLContext]) -> None:
        self._settings = settings
        self._make = make
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._context = make(settings)
        self._look_at = time.monotonic() + _LOOK_AGAIN_SECONDS
        self.is_stale = False

    def context(self) -> ssl.SSLContext:
        with self._lock:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = now + _LOOK_AGAIN_SECONDS
                self._look()
            return self._context

    def _look(self) -> None:
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._context = self._make(self._settings)
        except UserError as error:
            self.is_stale = True
            _log.warning("TLS files changed and cannot be used, the last good ones stay: %s", error)
        else:
            self.is_stale = False
            _log.info("TLS files changed: new connections use them")

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        settings = self._settings
        return [_stamp(path) for path in (settings.ca, settings.certificate, settings.key) if path is not None]


_LATER: dict[str, Any] = {"do_handshake_on_connect": False, "suppress_ragged_eofs": True}


def _shake_hands(sock: socket.socket, deadline: float, wrap: Callable[[], ssl.SSLSocket]) -> TlsSocket:
    try:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        sock.settimeout(left)
        wrapped = wrap()
    except BaseException:
        sock.close()
        raise
    try:
        wrapped.do_handshake()
        return TlsSocket(wrapped)
    except TimeoutError:
        wrapped.close()
        raise TimeoutError(errno.ETIMEDOUT, "the TLS handshake timed out") from None
    except ssl.SSLError as error:
        _part(wrapped, deadline)
        raise tls_error(error) from None
    except ValueError as error:  # the peer left between accept and here
        wrapped.close()
        raise TlsError(errno.ENOTCONN, str(error)) from None
    except BaseException:
        wrapped.close()
        raise


def _part(sock: ssl.SSLSocket, deadline: float) -> None:
    """Close so that the peer can read why: closing with unread input would reset the connection and lose the alert."""
    give_up = min(deadline, time.monotonic() + _FAREWELL_SECONDS)
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_WR)
        while (left := give_up - time.monotonic()) > 0:
            sock.settimeout(left)
            if not socket.socket.recv(sock, 4096):
                break
    sock.close()


def _server_context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Clients keep their connections and resume none. A ticket that a client has not read when it closes would also turn
    # its farewell into a reset, which takes what it sent last with it.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_certificate(context, settings)
    if settings.ca is not None:
        _load_ca(context, settings.ca, where="tls_client_ca")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the certificate and its name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.ca is not None:
        _load_ca(context, settings.ca, where="tls_ca")
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    _load_certificate(context, settings)
    return context


def _load_ca(context: ssl.SSLContext, path: Path, *, where: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except OSError as error:
        reason = "no PEM certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise UserError(f"cannot use {path}: {reason}", where=where, remedy="give a readable PEM file") from None


def _load_certificate(context: ssl.SSLContext, settings: TlsSettings) -> None:
    if settings.certificate is None or settings.key is None:
        return
    for path, where in ((settings.certificate, "tls_certificate"), (settings.key, "tls_key")):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", where=where, remedy="give a readable file"
            ) from None
    try:
        context.load_cert_chain(settings.certificate, settings.key, password=_no_passphrase)
    except OSError as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        raise UserError(
            f"{settings.key} is not the key of {settings.certificate}"
            if mismatch
            else f"{settings.certificate} and {settings.key} are not a PEM certificate and key",
            where="tls_certificate",
            remedy="give the certificate with its chain in one file and its private key in the other",
        ) from None


def _no_passphrase() -> str:
    raise UserError("the key is encrypted", where="tls_key", remedy="store it decrypted, readable by this user only")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
