"""From a client's request to the engine that is to answer it: reads the body and asks the policy. Sends nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvhearth.router import replies
from kvhearth.router.body import (
    BadBody,
    Routable,
    is_form,
    read_body,
    read_fields,
    routable_of,
    session_of,
    with_model,
)
from kvhearth.router.decisions import Choice, DecisionLog
from kvhearth.router.exchange import Exchange
from kvhearth.router.replies import Refused
from kvhearth.routing.hashing import BYTES_PER_TOKEN, DEFAULT_PIECE_BYTES, content_seed, prefix_hashes
from kvhearth.routing.policies.kv_aware import NO_HITS
from kvhearth.routing.policies.least_loaded import LeastLoaded
from kvhearth.routing.policies.prefix import Prefix
from kvhearth.routing.ports import Decision, EngineView, Policy, RouteRequest

if TYPE_CHECKING:
    from kvhearth.router.client import ClientConnection, Request
    from kvhearth.router.engines import Engine, Target
    from kvhearth.router.kv import KvRouting
    from kvhearth.router.router import Router
    from kvhearth.router.tokens import TokenIds

log = logging.getLogger(__name__)

UNPROMPTED = frozenset({b"/tokenize", b"/detokenize", b"/v1/messages/count_tokens"})
"""Routes that compute no KV: they go to whichever engine has least to do, and no policy learns from them."""

PREFILL_PATIENCE = 2.0
"""Times the prediction after which the prompt of an answer that is not streamed, and shows no first token, is done."""

PIECE_TOKENS = DEFAULT_PIECE_BYTES // BYTES_PER_TOKEN


class Dispatcher:
    """Decides for one router.

    Args:
        policy: what picks.
        kv: token ids and the index behind policy kv-aware; None for the policies that need neither.
        aliases: further names of models.
        decisions: keeps what was decided.
    """

    def __init__(
        self, router: Router, policy: Policy, kv: KvRouting | None, aliases: Mapping[str, str], decisions: DecisionLog
    ) -> None:
        self._router = router
        self._policy = policy
        self._kv = kv
        self._aliases = aliases
        self._decisions = decisions
        self._by_text = policy.name == Prefix.name or kv is not None
        self._least_loaded = LeastLoaded()

    # One request

    def forward(self, client: ClientConnection, request: Request) -> Exchange:
        """Begin the exchange that answers this complete request; raises Refused."""
        router = self._router
        if len(router.exchanges) >= router.limits.max_requests_in_flight:
            raise Refused(replies.error(503, "too many requests in flight", "overloaded", retry_after_seconds=1))
        started = time.perf_counter()
        try:
            if self._kv is not None and request.path not in UNPROMPTED and not is_form(request.content_type):
                return self._forward_by_tokens(client, request, self._kv, started)
            routable = read_body(request.body, request.content_type)
        except BadBody as bad:
            raise _bad(bad) from None
        model = self._model(routable.model, request)
        serving = self._serving(model)
        route = self._route(model, routable, request)
        choice = self._choose(route, request, serving, started)
        if choice is None:
            raise self._nobody(model, serving)
        return self._begin(client, request, route, choice)

    def pick_other(self, route: RouteRequest, request: Request, *, excluding: Engine) -> Choice | None:
        """Another engine for a request whose first one failed; None when there is none."""
        serving = self._router.fleet.serving(route.model) or ()
        others = [target for target in serving if target.engine is not excluding]
        return self._choose(route, request, others, time.perf_counter())

    def observed(self, route: RouteRequest, choice: Choice, seconds: float) -> None:
        """The first token of a stream has come that long after its request was sent."""
        self._router.instruments.predicted(route.model, choice.decision.predicted_seconds, seconds)
        if self._kv is not None:
            self._kv.policy.predictor.observe(choice.view, route.prompt_tokens, choice.decision.hits, seconds)

    def _begin(self, client: ClientConnection, request: Request, route: RouteRequest, choice: Choice) -> Exchange:
        exchange = Exchange(self._router, client, request, route)
        self._router.exchanges.add(exchange)
        exchange.start(route, choice)
        return exchange

    # With token ids

    def _forward_by_tokens(self, client: ClientConnection, request: Request, kv: KvRouting, started: float) -> Exchange:
        fields = read_fields(request.body)
        named = fields.get("model")
        if named is not None and not isinstance(named, str):
            raise BadBody("Expected `str | null` - at `model`", "model")
        request.streams = fields.get("stream") is True
        model = self._model(named, request)
        serving = self._serving(model)
        found = kv.tokens_of(request.path, fields, model)
        if not isinstance(found, asyncio.Future):
            route = self._keyed(kv, model, fields, request, found)
            choice = self._choose(route, request, serving, started)
            if choice is None:
                raise self._nobody(model, serving)
            return self._begin(client, request, route, choice)
        exchange = Exchange(self._router, client, request, RouteRequest(model, (), 0))
        self._router.exchanges.add(exchange)
        exchange.wait_for(self._when_found(exchange, kv, fields, model, request, found))
        return exchange

    async def _when_found(
        self,
        exchange: Exchange,
        kv: KvRouting,
        fields: dict[str, Any],
        model: str,
        request: Request,
        found: asyncio.Future[TokenIds],
    ) -> None:
        try:
            ids = await kv.within_deadline(found)
            started = time.perf_counter()
            route = self._keyed(kv, model, fields, request, ids)
            serving = self._router.fleet.serving(model) or []  # as it is now
            choice = self._choose(route, request, serving, started)
            if choice is None:
                raise self._nobody(model, serving)
        except BadBody as bad:
            exchange.refuse(_bad(bad).reply)
        except Refused as refused:
            exchange.refuse(refused.reply)
        except Exception:
            log.exception("a request to %s could not be routed", request.path[:100].decode("latin-1"))
            exchange.refuse(replies.failed())
        else:
            exchange.start(route, choice)

    def _keyed(
        self, kv: KvRouting, model: str, fields: dict[str, Any], request: Request, found: TokenIds
    ) -> RouteRequest:
        """A route by block keys where there are ids, else by text, and why."""
        session = request.session.decode("latin-1") or session_of(fields)
        salt = fields.get("cache_salt")
        lora = model if self._router.fleet.is_adapter(model) else ""
        keys, block_tokens, unkeyed = kv.keys(lora, salt if isinstance(salt, str) else "", found)
        if not unkeyed:
            return RouteRequest(model, (), len(found.ids), session, keys, block_tokens)
        routable = routable_of(fields)
        hashes = prefix_hashes(routable.content, seed=content_seed(model, routable.salt))
        tokens = len(found.ids) or routable.tokens
        return RouteRequest(model, hashes, tokens, session, unkeyed=unkeyed)

    # Parts of a decision

    def _model(self, named: str | None, request: Request) -> str:
        """The model that is meant; a body that named it by an alias is changed, for engines do not know that name."""
        if named is None:
            models = self._router.fleet.models()
            if len(models) > 1:
                message = "name the model, for there is more than one"
                raise Refused(replies.error(400, message, "model_missing", param="model"))
            return models[0] if models else ""
        model = self._aliases.get(named)
        if model is None:
            return named
        before = len(request.body)
        try:
            request.body = with_model(request.body, request.content_type, model)
        except BadBody as bad:
            raise _bad(bad) from None
        self._router.buffered_bytes += len(request.body) - before
        return model

    def _serving(self, model: str) -> list[Target]:
        fleet = self._router.fleet
        serving = fleet.serving(model)
        if serving is not None:
            return serving
        if fleet.fully_known():
            raise Refused(replies.error(404, f"the model {model!r} does not exist", "model_not_found", param="model"))
        return []

    def _nobody(self, model: str, serving: Sequence[Target]) -> Refused:
        code = "overloaded" if serving else "no_healthy_engine"
        message = "every engine with this model is full" if serving else "no healthy engine has this model"
        label = model if self._router.fleet.serving(model) is not None else ""
        return Refused(replies.error(503, message, code, retry_after_seconds=1), label)

    def _route(self, model: str, routable: Routable, request: Request) -> RouteRequest:
        hashes: Sequence[int] = ()
        if self._by_text and request.path not in UNPROMPTED:
            hashes = prefix_hashes(routable.content, seed=content_seed(model, routable.salt))
        session = request.session.decode("latin-1") if request.session else routable.session
        return RouteRequest(model, hashes, routable.tokens, session)

    def _choose(
        self, route: RouteRequest, request: Request, targets: Sequence[Target], started: float
    ) -> Choice | None:
        most = self._router.limits.max_requests_per_engine
        views: list[EngineView] = [target.view() for target in targets if target.engine.requests_in_flight < most]
        policy = self._least_loaded if request.path in UNPROMPTED else self._policy
        decision = policy.pick(route, views)
        if decision.engine is None:
            return None
        self._router.instruments.decided(time.perf_counter() - started, route, decision)
        if self._kv is not None:
            self._kv.dispatched(decision.engine)
        number = self._decisions.add(request.request_id, route, views, decision)
        target = self._router.fleet.targets[decision.engine]
        prefill = route.prompt_tokens
        if decision.matched or route.block_tokens:
            prefill = max(0, prefill - sum(decision.hits) - decision.matched * PIECE_TOKENS)
        view = target.view()
        lines = self._header_lines(target, route, decision, number)
        if self._kv is None or request.streams or request.path in UNPROMPTED:
            return Choice(target, view, decision, prefill, lines)
        expected = decision.predicted_seconds
        if not expected:
            expected = self._kv.policy.predictor.predict(view, prefill, NO_HITS).seconds
        return Choice(target, view, decision, prefill, lines, PREFILL_PATIENCE * expected)

    def _header_lines(self, target: Target, route: RouteRequest, decision: Decision, number: int) -> bytes:
        lines = b"x-kvhearth-engine: %b\r\nx-kvhearth-decision: %d\r\n" % (target.label, number)
        if route.block_tokens:
            hits = decision.hits
            lines += b"x-kvhearth-hit: tokens=%d, hbm=%d, dram=%d, store=%d\r\n" % (sum(hits), *hits)
        elif route.prefix_hashes:
            lines += b"x-kvhearth-hit: pieces=%d/%d\r\n" % (decision.matched, len(route.prefix_hashes))
        return lines


def _bad(bad: BadBody) -> Refused:
    return Refused(replies.error(400, bad.message, "bad_body", param=bad.param))
