"""Who may ask for what: with the operator's key, a tenant's, the one for all, or none. Looks at heads only."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from kvhearth.router import replies
from kvhearth.router.operator import is_for_operator
from kvhearth.router.pages import FOR_OPERATORS
from kvhearth.router.tenants import Tenant, Tenants

if TYPE_CHECKING:
    from kvhearth.router.client import Request
    from kvhearth.router.config import RouterConfig
    from kvhearth.router.headers import HeaderLines

OPEN = b"/health"
"""What needs no key."""

NOT_FROM_TENANTS = frozenset({b"authorization", b"x-api-key", b"x-vllm-priority"})
"""A tenant's key is for the router, and engines get their own; its place in an engine's queue is not for it to say."""


class Access:
    """Of one router.

    Args:
        tenants: where clients are told apart; None where they are not.
    """

    def __init__(self, config: RouterConfig, tenants: Tenants | None) -> None:
        self._tenants = tenants
        self._bearer = _bearer(config.api_key)
        self._operator = _bearer(config.admin_key)
        self._is_open = tenants is None and self._bearer is None and self._operator is None
        key = _bearer(config.engine_key)
        self._for_engines = b"" if key is None else b"authorization: %b\r\n" % key

    def is_operators(self, path: bytes) -> bool:
        """Whether the path is one that the operator's key opens, and there is such a key."""
        return self._operator is not None and is_for_operator(path)

    def refuse(self, request: Request, headers: HeaderLines) -> replies.Reply | None:
        """Why a request is refused, or None; then it knows its tenant, and what of its head engines are to see."""
        if self._is_open:
            return None
        given = headers.first(b"authorization") or b""
        if self.is_operators(request.path):
            return None if _same(given, self._operator) else _unauthorized("this route wants the operator's key")
        if self._tenants is not None:
            request.tenant = _tenant(self._tenants, given, headers.first(b"x-api-key"))
            is_open = request.path == OPEN or (request.path in FOR_OPERATORS and _same(given, self._operator))
            if request.tenant is None and not is_open:
                return _unauthorized("this router knows no such API key")
            request.forwarded = headers.forwarded(without=NOT_FROM_TENANTS) + self._for_engines
        elif self._bearer is not None and request.path != OPEN and not _same(given, self._bearer):
            return _unauthorized("this router wants its API key")
        return None


def _bearer(key: str | None) -> bytes | None:
    return None if key is None else f"Bearer {key}".encode()


def _same(given: bytes, wanted: bytes | None) -> bool:
    return wanted is not None and hmac.compare_digest(given, wanted)


def _tenant(tenants: Tenants, authorization: bytes, key: bytes | None) -> Tenant | None:
    if authorization or key is None:
        return tenants.authenticate(authorization)
    return tenants.by_key(key)  # as Anthropic's clients send it


def _unauthorized(message: str) -> replies.Reply:
    message += ": send Authorization: Bearer <key>"
    return replies.error(401, message, "invalid_api_key", extra=b"www-authenticate: Bearer\r\n")
