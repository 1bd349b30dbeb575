"""From a client's request to the engine that is to answer it: reads the body, asks the policy, and has requests wait
while every engine is full. Sends nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

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
from kvhearth.router.rewrite import CLIENT_MAY_NOT_SET, rewrite
from kvhearth.router.waiting import Ticket
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
    from kvhearth.router.tenants import Tenant
    from kvhearth.router.tokens import TokenIds

log = logging.getLogger(__name__)

UNPROMPTED = frozenset({b"/tokenize", b"/detokenize", b"/v1/messages/count_tokens"})
"""Routes that compute no KV: they go to whichever engine has least to do, and no policy learns from them."""

PREFILL_PATIENCE = 2.0
"""Times the prediction after which the prompt of an answer that is not streamed, and shows no first token, is done."""

MOST_RETRY_AFTER_SECONDS = 60

PIECE_TOKENS = DEFAULT_PIECE_BYTES // BYTES_PER_TOKEN


class Dispatcher:
    """Decides for one router.

    Args:
        policy: what picks.
        kv: token ids and the index behind policy kv-aware; None for the policies that need neither.
        decisions: keeps what was decided.
    """

    def __init__(self, router: Router, policy: Policy, kv: KvRouting | None, decisions: DecisionLog) -> None:
        self._router = router
        self._policy = policy
        self._kv = kv
        self._decisions = decisions
        self._by_text = policy.name == Prefix.name or kv is not None
        self._least_loaded = LeastLoaded()

    # One request

    def forward(self, client: ClientConnection, request: Request) -> Exchange:
        """Begin the exchange that answers this complete request; raises Refused."""
        router = self._router
        if len(router.exchanges) >= router.limits.max_requests_in_flight:
            raise Refused(replies.error(503, "too many requests in flight", "overloaded", retry_after_seconds=1))
        router.retries.request()
        started = time.perf_counter()
        try:
            self._rewrite(request)
            if self._kv is not None and request.path not in UNPROMPTED and not is_form(request.content_type):
                return self._forward_by_tokens(client, request, self._kv, started)
            routable = read_body(request.body, request.content_type)
        except BadBody as bad:
            raise _bad(bad) from None
        model = self._model(routable.model, request)
        self._serving(model, request)
        route = self._route(model, routable, request)
        return self._place(None, client, request, route, started)

    def pick_other(self, route: RouteRequest, request: Request, *, excluding: Collection[Engine]) -> Choice | None:
        """Another engine for a request whose first ones failed; None when there is none."""
        serving = self._router.fleet.serving(route.model) or ()
        others = [target for target in serving if target.engine not in excluding]
        return self._choose(route, request, others, time.perf_counter())

    def pick_prefiller(self, route: RouteRequest, request: Request) -> Choice | None:
        """An engine of role prefill for a prompt; None when none has room."""
        return self._choose(route, request, self._router.fleet.prefilling(route.model), time.perf_counter())

    def observed(self, route: RouteRequest, choice: Choice, seconds: float) -> None:
        """The first token of a stream has come that long after its request was sent."""
        self._router.instruments.predicted(route.model, choice.decision.predicted_seconds, seconds)
        if self._kv is not None:
            self._kv.policy.predictor.observe(choice.view, route.prompt_tokens, choice.decision.hits, seconds)

    def seat(self) -> None:
        """Give those who wait the engines that have room, in their order."""
        waiting, fleet = self._router.waiting, self._router.fleet
        for model in waiting.models():
            while (ticket := waiting.next(model)) is not None:
                exchange: Exchange = ticket.owner
                serving = fleet.serving(model) or ()
                choice = self._choose(exchange.route, exchange.request, serving, time.perf_counter())
                if choice is None:
                    waiting.put_back(ticket)
                    break
                self._start(exchange, exchange.route, choice)

    def too_late(self, now: float) -> None:
        """Answer those who have waited in vain."""
        for ticket in self._router.waiting.expired(now):
            self._router.instruments.queued("expired")
            ticket.owner.refuse(self._full(ticket.model).reply)

    # One place, now or later

    def _place(
        self, exchange: Exchange | None, client: ClientConnection, request: Request, route: RouteRequest, started: float
    ) -> Exchange:
        """Send a request to an engine, or have it wait for one; raises Refused.

        Args:
            exchange: what is to become of it, where there is one already.
        """
        tenant = request.tenant
        if tenant is not None:
            self._admit(tenant, route)
        try:
            choice = ticket = None
            waiting = self._router.waiting
            if not waiting or not waiting.waiting_for(route.model):
                serving = self._router.fleet.serving(route.model) or ()
                choice = self._choose(route, request, serving, started)
            if choice is None:
                ticket = self._ticket(route, tenant)
        except Refused:
            if tenant is not None:
                tenant.turned_away(self._router.now(), route.prompt_tokens)
            raise
        if exchange is None:
            exchange = Exchange(self._router, client, request, route)
            self._router.exchanges.add(exchange)
        if tenant is not None:
            exchange.charge(tenant)
        if choice is not None:
            self._start(exchange, route, choice)
        elif ticket is not None:
            ticket.owner = exchange
            exchange.queue(route, ticket)
            self._router.room_made()  # behind others, perhaps, but not for nothing
        return exchange

    def _start(self, exchange: Exchange, route: RouteRequest, choice: Choice) -> None:
        router, tenant = self._router, exchange.request.tenant
        if tenant is not None:  # fairness counts it, whether it has waited or not
            router.waiting.served(tenant.name, tenant.weight, route.prompt_tokens, route.model)
        if router.fleet.is_disaggregated and router.prefill.wanted(exchange.request, route, choice):
            exchange.take(route, choice)
            exchange.wait_for(router.prefill.run(exchange, route))
        else:
            exchange.start(route, choice)

    def _admit(self, tenant: Tenant, route: RouteRequest) -> None:
        refusal = tenant.admit(self._router.now(), route.prompt_tokens)
        if refusal is not None:
            raise Refused(refusal, route.model)

    def _ticket(self, route: RouteRequest, tenant: Tenant | None) -> Ticket:
        """A place in the waiting room; raises Refused where there is none, or nobody to wait for."""
        router, settings = self._router, self._router.queue
        if not router.fleet.serving(route.model):
            raise self._nobody(route.model)
        if not settings.wait_seconds:
            raise self._full(route.model)
        name, priority, weight, most = "", 0, 1.0, settings.max_waiting_of_tenant
        if tenant is None:
            most = settings.max_waiting_requests + 1  # there is but one: the room bounds it
        else:
            name, priority, weight, most = tenant.name, tenant.priority, tenant.weight, tenant.max_waiting or most
        deadline = router.now() + settings.wait_seconds
        ticket = Ticket(None, route.model, name, priority, weight, max(1, route.prompt_tokens), deadline)
        full = router.waiting.add(ticket, most)
        for displaced in router.waiting.displaced():
            router.instruments.queued("displaced")
            displaced.owner.refuse(self._too_many(route.model))
        if full:
            router.instruments.queued(full)
        if full == "tenant_full":
            raise Refused(self._too_many(route.model), route.model)
        if full:
            raise self._full(route.model)
        return ticket

    # With token ids

    def _forward_by_tokens(self, client: ClientConnection, request: Request, kv: KvRouting, started: float) -> Exchange:
        fields = read_fields(request.body)
        named = fields.get("model")
        if named is not None and not isinstance(named, str):
            raise BadBody("Expected `str | null` - at `model`", "model")
        request.streams = fields.get("stream") is True
        model = self._model(named, request)
        self._serving(model, request)
        found = kv.tokens_of(request.path, fields, model)
        if not isinstance(found, asyncio.Future):
            route = self._keyed(kv, model, fields, request, found)
            return self._place(None, client, request, route, started)
        exchange = Exchange(self._router, client, request, RouteRequest(model, (), 0))
        self._router.exchanges.add(exchange)
        exchange.wait_for(self._when_found(exchange, client, kv, fields, model, found))
        return exchange

    async def _when_found(
        self,
        exchange: Exchange,
        client: ClientConnection,
        kv: KvRouting,
        fields: dict[str, Any],
        model: str,
        found: asyncio.Future[TokenIds],
    ) -> None:
        request = exchange.request
        try:
            ids = await kv.within_deadline(found)
            started = time.perf_counter()
            route = self._keyed(kv, model, fields, request, ids)
            self._place(exchange, client, request, route, started)
        except BadBody as bad:
            exchange.refuse(_bad(bad).reply)
        except Refused as refused:
            exchange.refuse(refused.reply)
        except Exception:
            log.exception("a request to %s could not be routed", request.path[:100].decode("latin-1"))
            exchange.refuse(replies.failed())

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
        model = self._router.config.aliases.get(named)
        if model is None:
            return named
        before = len(request.body)
        try:
            request.body = with_model(request.body, request.content_type, model)
        except BadBody as bad:
            raise _bad(bad) from None
        self._router.buffered_bytes += len(request.body) - before
        return model

    def _rewrite(self, request: Request) -> None:
        """Take out what a tenant may not say of itself, and put in what keeps its KV apart."""
        tenant = request.tenant
        if tenant is None:
            return
        if is_form(request.content_type):
            if tenant.salt or any(name.encode() in request.body for name in CLIENT_MAY_NOT_SET):
                message = "forms have no place for what keeps this key's data apart: send JSON"
                raise Refused(replies.error(400, message, "form_not_allowed"))
            return
        path = unquote_to_bytes(request.path) if b"%" in request.path else request.path
        salted = tenant.salt and path not in UNPROMPTED and not path.rstrip(b"/").endswith(b"/render")
        before = len(request.body)
        request.body = rewrite(request.body, drop=CLIENT_MAY_NOT_SET, put={"cache_salt": tenant.salt} if salted else {})
        self._router.buffered_bytes += len(request.body) - before

    def _serving(self, model: str, request: Request) -> None:
        """Raises Refused for a model that does not exist, or not for this tenant."""
        fleet, tenant = self._router.fleet, request.tenant
        unknown = fleet.serving(model) is None and fleet.fully_known()
        if unknown or (tenant is not None and not tenant.may_use(model)):
            raise Refused(replies.error(404, f"the model {model!r} does not exist", "model_not_found", param="model"))

    def _nobody(self, model: str) -> Refused:
        label = model if self._router.fleet.serving(model) is not None else ""
        message = "no healthy engine has this model"
        return Refused(replies.error(503, message, "no_healthy_engine", retry_after_seconds=1), label)

    def _full(self, model: str) -> Refused:
        wait = self._retry_after(model)
        message = "every engine with this model is full"
        return Refused(replies.error(503, message, "overloaded", retry_after_seconds=wait), model)

    def _too_many(self, model: str) -> replies.Reply:
        wait = self._retry_after(model)
        return replies.error(429, "too many of your requests wait already", "queue_full", retry_after_seconds=wait)

    def _retry_after(self, model: str) -> int:
        wait = min(float(self._router.waiting.estimated_wait_seconds(model)), MOST_RETRY_AFTER_SECONDS)
        return max(1, round(wait))

    def _route(self, model: str, routable: Routable, request: Request) -> RouteRequest:
        hashes: Sequence[int] = ()
        if self._by_text and request.path not in UNPROMPTED:
            hashes = prefix_hashes(routable.content, seed=content_seed(model, routable.salt))
        session = request.session.decode("latin-1") if request.session else routable.session
        return RouteRequest(model, hashes, routable.tokens, session)

    def _choose(
        self, route: RouteRequest, request: Request, targets: Sequence[Target], started: float
    ) -> Choice | None:
        views: list[EngineView] = [
            target.view() for target in targets if target.engine.requests_in_flight < target.engine.capacity.most
        ]
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
