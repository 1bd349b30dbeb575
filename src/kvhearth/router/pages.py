"""Pages of the router's own: health, metrics, models, explained decisions. What engines answer is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import msgspec

from kvhearth.metrics.registry import CONTENT_TYPE
from kvhearth.router import replies
from kvhearth.router.models import model_cards
from kvhearth.router.replies import Refused

if TYPE_CHECKING:
    from kvhearth.router.client import Request
    from kvhearth.router.decisions import DecisionLog
    from kvhearth.router.router import Router

FOR_OPERATORS = frozenset({b"/metrics", b"/debug/decision"})


class Pages:
    """Answers them.

    Metrics and decisions tell of all tenants: where there are any, only the operator's key opens them.
    """

    def __init__(self, router: Router, decisions: DecisionLog) -> None:
        self._router = router
        self._decisions = decisions
        self._pages: dict[bytes, Callable[[Request], replies.Reply]] = {
            b"/health": self._health,
            b"/v1/models": self._models,
            b"/metrics": self._metrics,
            b"/debug/decision": self._explained,
        }

    def __contains__(self, path: bytes) -> bool:
        return path in self._pages or path.startswith(b"/v1/models/")

    def page(self, request: Request, *, is_forwarded: bool) -> replies.Reply:
        """The page asked for; raises Refused. ``is_forwarded``: engines answer this route, with another method."""
        page = self._pages.get(request.path)
        if request.tenant is not None and request.path in FOR_OPERATORS:
            page = None
        if page is None and request.path.startswith(b"/v1/models/"):
            page = self._model
        if page is not None and request.method in {b"GET", b"HEAD"}:
            return page(request)
        shown = request.path[:100].decode("ascii", "replace")
        if page is None and not is_forwarded:
            raise Refused(replies.error(404, f"there is no route {shown}", "no_route"))
        allow = b"allow: POST\r\n" if page is None else b"allow: GET, HEAD\r\n"
        raise Refused(replies.error(405, f"{shown} does not take this method", "bad_method", extra=allow))

    def _health(self, request: Request) -> replies.Reply:
        if self._router.fleet.healthy() and not self._router.draining:
            return replies.Reply(200, b"")
        message = "the router is stopping" if self._router.draining else "no engine is healthy"
        return replies.error(503, message, "unhealthy", retry_after_seconds=1)

    def _metrics(self, request: Request) -> replies.Reply:
        return replies.Reply(200, self._router.registry.expose(), content_type=CONTENT_TYPE.encode())

    def _models(self, request: Request) -> replies.Reply:
        return replies.Reply(200, msgspec.json.encode({"object": "list", "data": self._cards(request)}))

    def _cards(self, request: Request) -> list[dict[str, Any]]:
        cards = model_cards(self._router.fleet.engines, self._router.config.aliases)
        tenant = request.tenant
        return cards if tenant is None else [card for card in cards if tenant.may_use(card["id"])]

    def _model(self, request: Request) -> replies.Reply:
        wanted = unquote(request.path.removeprefix(b"/v1/models/").decode("latin-1"))
        for card in self._cards(request):
            if card["id"] == wanted:
                return replies.Reply(200, msgspec.json.encode(card))
        raise Refused(replies.error(404, f"the model {wanted!r} does not exist", "model_not_found", param="model"))

    def _explained(self, request: Request) -> replies.Reply:
        query = parse_qs(request.target.partition(b"?")[2].decode("latin-1"))
        if "id" in query:
            found = self._decisions.find(query["id"][-1])
            if not found:
                message = "no decision of that id is kept any more: the last ones are at /debug/decision"
                raise Refused(replies.error(404, message, "no_decision", param="id"))
        else:
            found = self._decisions.last(_count(query.get("last", ["10"])[-1]))
        return replies.Reply(200, msgspec.json.encode({"decisions": found}))


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise Refused(replies.error(400, f"last={text[:20]!r} is not a number", "bad_query", param="last"))
    return int(text)
