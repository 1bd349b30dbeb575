"""TLS contexts: for the router's own listener, and for engines that are reached by https."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.router.config import Tls


class ListenerTls:
    """The listener's certificate; `refresh` takes a renewed one for the connections that come from then on."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self._files = (cert_file, key_file)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._seen = self._stamp()
        self._load()

    def refresh(self) -> bool:
        """Read the files again if they have changed. True when a new certificate is in force.

        Raises:
            UserError: they cannot be read or do not belong together; the old certificate stays.
        """
        seen = self._stamp()
        if seen == self._seen:
            return False
        self._seen = seen
        # In a context of its own first: one that took half of a pair would serve nobody.
        ListenerTls(*self._files)
        self._load()
        return True

    def _load(self) -> None:
        cert, key = self._files
        try:
            self.context.load_cert_chain(cert, key, password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise UserError(
                f"{cert} and {key} cannot be used ({error})",
                where="tls.cert_file",
                remedy="give a PEM certificate chain and its key, without a password",
            ) from None

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        stamps = []
        for path in self._files:
            try:
                found = path.stat()
            except OSError:
                stamps.append((0, 0, 0))
            else:
                stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return tuple(stamps)


def listener_tls(settings: Tls) -> ListenerTls | None:
    """None where the listener speaks plain HTTP."""
    if settings.cert_file is None or settings.key_file is None:
        return None
    return ListenerTls(settings.cert_file, settings.key_file)


def engines_tls(settings: Tls) -> ssl.SSLContext:
    """Verifies https engines, by the certificates named or by the system's.

    Raises:
        UserError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=settings.engine_ca_file)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"{settings.engine_ca_file} cannot be used ({error})",
            where="tls.engine_ca_file",
            remedy="give a file of PEM certificates",
        ) from None


def _no_password() -> str:
    raise ValueError("the key wants a password")
