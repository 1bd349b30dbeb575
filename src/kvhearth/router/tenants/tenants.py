"""All tenants of a file, found by their keys; the file is read again when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from kvhearth.errors import UserError
from kvhearth.metrics import MetricFamily
from kvhearth.metrics import router_tenants as names
from kvhearth.router.tenants.spec import OTHERS, TenantSpec, read_tenants
from kvhearth.router.tenants.tenant import Tenant

log = logging.getLogger(__name__)

MOST_LABELS = 100
"""Tenants with a label of their own in metrics, the first of the file; the others are ``other`` together."""
_BEARER = b"bearer "


class Tenants:
    """Keys are found by their digest, so that how long it takes tells nothing of them.

    Args:
        path: the tenants file.
        secret: what salts are made from; needed where a tenant is isolated.
        now: monotonic seconds.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(self, path: Path, secret: bytes, now: Callable[[], float]) -> None:
        self._path = path
        self._secret = secret
        self._now = now
        self._tenants: dict[str, Tenant] = {}
        self._by_digest: dict[bytes, Tenant] = {}
        self.failures = 0
        self.last_error = ""
        self._seen = self._stamp()
        self._obey(read_tenants(path))

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def authenticate(self, authorization: bytes) -> Tenant | None:
        """The tenant of a header ``Bearer <key>``."""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        return self.by_key(authorization[len(_BEARER) :].strip())

    def by_key(self, key: bytes) -> Tenant | None:
        """The tenant whose key this is."""
        return self._by_digest.get(hashlib.sha256(key).digest())

    async def refresh(self) -> None:
        """Read the file again if it has changed; one that cannot be used changes nothing."""
        seen = self._stamp()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._obey(await asyncio.to_thread(read_tenants, self._path))
        except UserError as error:
            self.failures += 1
            self.last_error = str(error)
            log.warning("the tenants stay as they were: %s", error)
            return
        self.last_error = ""
        log.info("%d tenants are in force", len(self._tenants))

    def metrics(self) -> Iterable[MetricFamily]:
        """For the registry."""
        in_flight: dict[tuple[str, ...], float] = {}
        outcomes: dict[tuple[str, ...], float] = {}
        tokens: dict[tuple[str, ...], float] = {}
        for number, tenant in enumerate(self._tenants.values()):
            label = tenant.name if number < MOST_LABELS else OTHERS
            in_flight[label,] = in_flight.get((label,), 0.0) + tenant.in_flight
            for sums, counts in ((outcomes, tenant.outcomes), (tokens, tenant.tokens)):
                for what, count in counts.items():
                    sums[label, what] = sums.get((label, what), 0.0) + count
        yield MetricFamily(names.IN_FLIGHT, list(in_flight.items()))
        yield MetricFamily(names.REQUESTS, list(outcomes.items()))
        yield MetricFamily(names.TOKENS, list(tokens.items()))
        yield MetricFamily(names.FILE_FAILURES, [((), float(self.failures))])

    def _obey(self, specs: Mapping[str, TenantSpec]) -> None:
        now = self._now()
        salts = {name: self._salt(spec.group) for name, spec in specs.items()}
        tenants: dict[str, Tenant] = {}
        for name, spec in specs.items():
            tenant = self._tenants.get(name)
            if tenant is None:
                tenant = Tenant(spec, salts[name], now)
            else:
                tenant.follow(spec, salts[name], now)
            tenants[name] = tenant
        self._tenants = tenants
        self._by_digest = {digest: tenants[name] for name, spec in specs.items() for digest in spec.keys}

    def _salt(self, group: str) -> str:
        """The same in every replica and after every restart, and not to be guessed."""
        if not group:
            return ""
        if not self._secret:
            raise UserError(
                f"{group} is kept apart, and there is no secret to make its salt from",
                where=str(self._path),
                remedy="set KVHEARTH_ROUTER_SALT_SECRET or a file of it",
            )
        return hmac.new(self._secret, b"kvhearth cache salt\0" + group.encode(), hashlib.sha256).hexdigest()

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_mtime_ns, found.st_size, found.st_ino)
