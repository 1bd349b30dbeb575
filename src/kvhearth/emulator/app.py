"""The HTTP surface of an emulated engine: which path answers what. No engine logic."""

from __future__ import annotations

import hmac
import json
import time
import uuid
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvhearth import __version__
from kvhearth.emulator.exposition import Exposition
from kvhearth.emulator.faults import Faults
from kvhearth.emulator.faulty import FaultLayer, FaultsEndpoint
from kvhearth.emulator.generate import GenerateEndpoint
from kvhearth.emulator.protocol import (
    ApiError,
    Generation,
    ModelLimits,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from kvhearth.emulator.ranks import Ranks
from kvhearth.emulator.replies import read_body, send_json
from kvhearth.emulator.vllm_hashes import Adapter
from kvhearth.engine.tokens import decode
from kvhearth.metrics import Registry
from kvhearth.metrics.registry import CONTENT_TYPE

EMULATED_VLLM = "0.32.0"
_OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/emulator/state"})


def build_app(
    ranks: Ranks,
    limits: ModelLimits,
    registry: Registry,
    exposition: Exposition,
    faults: Faults,
    *,
    stream_interval: int,
    api_key: str | None,
) -> ASGIApp:
    """The ASGI app of one engine."""
    pages = _Pages(ranks, limits, registry, exposition, faults)
    set_faults = FaultsEndpoint(faults, ranks.restart, pages.faults_changed)
    app = Starlette(
        routes=[
            Route(
                "/v1/completions", GenerateEndpoint(ranks, limits, parse_completion, stream_interval), methods=["POST"]
            ),
            Route(
                "/v1/chat/completions", GenerateEndpoint(ranks, limits, parse_chat, stream_interval), methods=["POST"]
            ),
            Route("/v1/models", pages.models),
            Route("/v1/models/{model:path}", pages.one_model),
            Route("/tokenize", pages.tokenize, methods=["POST"]),
            Route("/detokenize", pages.detokenize, methods=["POST"]),
            Route("/v1/completions/render", pages.render_completion, methods=["POST"]),
            Route("/v1/chat/completions/render", pages.render_chat, methods=["POST"]),
            Route("/health", pages.health),
            Route("/ping", pages.health, methods=["GET", "POST"]),
            Route("/version", pages.version),
            Route("/reset_prefix_cache", pages.reset_prefix_cache, methods=["POST"]),
            Route("/metrics", pages.metrics),
            Route("/emulator/state", pages.state),
            Route("/emulator/faults", set_faults.__call__, methods=["GET", "POST", "DELETE"]),
        ],
        exception_handlers={ApiError: _refuse, 404: _not_found, 405: _not_allowed},
    )
    return FaultLayer(app if api_key is None else BearerGate(app, api_key), faults)


def _rendered(generation: Generation) -> list[dict[str, Any]]:
    """What vLLM's render endpoints say of each prompt: a request for token ids in place of text."""
    return [
        {
            "request_id": uuid.uuid4().hex,
            "token_ids": prompt.token_ids,
            "features": None,
            "sampling_params": {"max_tokens": generation.max_tokens},
            "model": generation.model,
            "stream": generation.stream,
        }
        for prompt in generation.prompts
    ]


class BearerGate:
    """Lets only bearers of the key past, except to what is merely looked at by probes and scrapers.

    vLLM's ``--api-key`` guards ``/v1`` alone; here what changes or costs something elsewhere is guarded too.
    """

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = b"Bearer " + api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                error = {"message": "Unauthorized", "type": "AuthenticationError", "param": None, "code": 401}
                await send_json(send, 401, msgspec.json.encode({"error": error}), ((b"www-authenticate", b"Bearer"),))
                return
        await self._app(scope, receive, send)


class _Pages:
    """The plain endpoints."""

    def __init__(
        self, ranks: Ranks, limits: ModelLimits, registry: Registry, exposition: Exposition, faults: Faults
    ) -> None:
        self._ranks = ranks
        self._faults = faults
        self._stale: bytes | None = None
        self._limits = limits
        self._registry = registry
        self._exposition = exposition
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        adapters = [self._adapter_card(adapter) for adapter in self._limits.adapters]
        return JSONResponse({"object": "list", "data": [self._card(), *adapters]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        for adapter in self._limits.adapters:
            if adapter.name == name:
                return JSONResponse(self._adapter_card(adapter))
        if name != self._limits.name:
            raise ApiError(f"The model `{name}` does not exist.", "model", 404, "NotFoundError")
        return JSONResponse(self._card())

    async def tokenize(self, request: Request) -> Response:
        token_ids, with_strings = parse_tokenize(await self._body(request), self._limits)
        strings = [decode([token_id]) for token_id in token_ids] if with_strings else None
        return JSONResponse(
            {
                "count": len(token_ids),
                "max_model_len": self._limits.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def render_completion(self, request: Request) -> Response:
        return JSONResponse(_rendered(parse_completion(await self._body(request), self._limits)))

    async def render_chat(self, request: Request) -> Response:
        return JSONResponse(_rendered(parse_chat(await self._body(request), self._limits))[0])

    async def detokenize(self, request: Request) -> Response:
        return JSONResponse({"prompt": decode(parse_detokenize(await self._body(request), self._limits))})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._ranks.dead is None else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": EMULATED_VLLM, "kvhearth": __version__})

    async def reset_prefix_cache(self, request: Request) -> Response:
        external = request.query_params.get("reset_external", "false").lower() in ("true", "1")
        return JSONResponse({"success": self._ranks.reset_prefix_cache(external)})

    async def metrics(self, request: Request) -> Response:
        if self._stale is not None:
            self._faults.note("stale_metrics")
        page = self._registry.expose() if self._stale is None else self._stale
        return Response(page, media_type=None, headers={"content-type": CONTENT_TYPE})

    async def state(self, request: Request) -> Response:
        return Response(json.dumps(self._exposition.state(), indent=1) + "\n", media_type="application/json")

    def faults_changed(self) -> None:
        """Keep the page that is to grow stale, or go on from it."""
        if not self._faults.settings.stale_metrics:
            self._stale = None
        elif self._stale is None:
            self._stale = self._registry.expose()

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.receive, self._limits.max_body_bytes)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._limits.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvhearth",
            "root": self._limits.name,
            "parent": None,
            "max_model_len": self._limits.max_model_len,
        }

    def _adapter_card(self, adapter: Adapter) -> dict[str, object]:
        return {**self._card(), "id": adapter.name, "root": adapter.path, "parent": self._limits.name}


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = error if isinstance(error, ApiError) else ApiError(str(error))
    return JSONResponse(refusal.body, status_code=refusal.status)


async def _not_found(request: Request, error: Exception) -> Response:
    return await _refuse(request, ApiError(f"Not Found: {request.url.path}", None, 404, "NotFoundError"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    message = f"Method Not Allowed: {request.method} {request.url.path}"
    return await _refuse(request, ApiError(message, None, 405, "BadRequestError"))
