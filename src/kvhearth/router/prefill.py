"""Prefill and decode apart: an engine of role prefill computes the prompt, and the decode engine is told of its KV.

Whatever goes wrong with that, the decode engine computes the prompt itself; a client does not notice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvhearth.metrics import MetricFamily, Registry
from kvhearth.metrics import router_prefill as names
from kvhearth.router.ask import ask_engine
from kvhearth.router.body import BadBody, read_fields
from kvhearth.router.rewrite import rewrite
from kvhearth.routing.ports import RouteRequest

if TYPE_CHECKING:
    from kvhearth.router.client import Request
    from kvhearth.router.decisions import Choice
    from kvhearth.router.exchange import Exchange
    from kvhearth.router.router import Router

log = logging.getLogger(__name__)

PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
"""Those of which vLLM takes ``kv_transfer_params``, and of which a first token shows that the prompt is computed."""

NOT_FOR_PREFILL = frozenset(
    {"stream", "stream_options", "min_tokens", "max_completion_tokens", "n", "best_of", "logprobs", "top_logprobs"}
    | {"prompt_logprobs", "echo", "response_format", "tool_choice", "structured_outputs"}
)
"""Fields that shape an answer, of which a prefill gives none."""

NIXL_ASKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's NixlConnector wants to hear so that it keeps a prompt's blocks for another engine to fetch."""


class PrefillFirst:
    """Of one router."""

    def __init__(self, router: Router, registry: Registry) -> None:
        self._router = router
        self._outcomes: Counter[str] = Counter()
        self._seconds = registry.tallies(names.PREFILL_SECONDS)
        registry.collect_from(self._read)

    def wanted(self, request: Request, route: RouteRequest, choice: Choice) -> bool:
        """Whether another engine than the one chosen for decode is to compute the prompt."""
        if not self._router.fleet.prefilling(route.model) or request.path not in PATHS:
            return False
        if choice.prefill_tokens <= self._router.config.disaggregation.local_prefill_tokens:
            self._outcomes["short"] += 1
            return False
        return True

    async def run(self, exchange: Exchange, route: RouteRequest) -> None:
        """Prefill, then send the exchange to the decode engine that it has taken; ends with that in any case."""
        request = exchange.request
        try:
            params = await self._prefill(request, route)
            if params:
                before = len(request.body)
                request.body = rewrite(request.body, drop=(), put={"kv_transfer_params": params})
                self._router.buffered_bytes += len(request.body) - before
        except BadBody:
            self._outcomes["shape"] += 1  # the engine will say what is wrong with it
        except Exception:
            log.exception("a prompt could not be prefilled apart")
        exchange.send()

    async def _prefill(self, request: Request, route: RouteRequest) -> dict[str, Any]:
        """What the decode engine is to be told; nothing when it has to compute the prompt itself."""
        fields = read_fields(request.body)
        if _several_prompts(fields):
            self._outcomes["shape"] += 1
            return {}
        choice = self._router.dispatcher.pick_prefiller(route, request)
        if choice is None:
            self._outcomes["full"] += 1
            return {}
        started = self._router.now()
        choice.target.load(route.prompt_tokens, choice.prefill_tokens)
        try:
            status, answer = await self._ask(choice, request, fields)
        except TimeoutError:
            return self._failed(choice, "late")
        except OSError:
            return self._failed(choice, "lost")
        finally:
            choice.target.unload(route.prompt_tokens, choice.prefill_tokens)
            self._router.room_made()
        now = self._router.now()
        self._router.fleet.answered(choice.target.engine, status, now)
        if status != 200 or not isinstance(answer, dict):
            self._outcomes["refused"] += 1
            return {}
        self._outcomes["done"] += 1
        self._seconds[route.model].observe(now - started)
        return self._told(fields, answer, route)

    async def _ask(self, choice: Choice, request: Request, fields: dict[str, Any]) -> tuple[int, Any]:
        question = {name: value for name, value in fields.items() if name not in NOT_FOR_PREFILL}
        question |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in fields:
            question["max_completion_tokens"] = 1
        if self._router.config.disaggregation.transfer == "nixl":
            question["kv_transfer_params"] = {**_params(fields), **NIXL_ASKS}
        target = choice.target
        headers = _without_content_type(request.forwarded)
        if target.rank is not None:
            headers += b"x-data-parallel-rank: %d\r\n" % target.rank
        return await ask_engine(
            target.engine,
            self._router.limits,
            request.target.decode("latin-1"),
            question,
            headers=headers,
            seconds=self._router.timeouts.first_byte_seconds,
        )

    def _told(self, fields: dict[str, Any], answer: dict[str, Any], route: RouteRequest) -> dict[str, Any]:
        settings = self._router.config.disaggregation
        if settings.transfer == "nixl":
            told = answer.get("kv_transfer_params")
            return {**_params(fields), **told} if isinstance(told, dict) else {}
        usage = answer.get("usage")
        counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        tokens = counted if isinstance(counted, int) else route.prompt_tokens
        promise = {"await_tokens": tokens, "await_seconds": settings.await_seconds}
        own = _params(fields).get("kvhearth")
        return {**_params(fields), "kvhearth": {**(own if isinstance(own, dict) else {}), **promise}}

    def _failed(self, choice: Choice, outcome: str) -> dict[str, Any]:
        self._outcomes[outcome] += 1
        self._router.instruments.upstream_failed(choice.target.name, f"prefill_{outcome}")
        self._router.fleet.failed(choice.target.engine, self._router.now())
        return {}

    def _read(self) -> Iterable[MetricFamily]:
        yield MetricFamily(names.PREFILLS, [((outcome,), float(n)) for outcome, n in self._outcomes.items()])


def _several_prompts(fields: dict[str, Any]) -> bool:
    prompt = fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _params(fields: dict[str, Any]) -> dict[str, Any]:
    params = fields.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def _without_content_type(lines: bytes) -> bytes:
    kept = [line for line in lines.split(b"\r\n") if line and not line.lower().startswith(b"content-type:")]
    return b"".join(line + b"\r\n" for line in kept)
