"""What the operator's key opens: how each engine is, and taking one out for a while. Clients have no part in it.

GET  /engines                 every engine: state, load, what it may have at once, its breaker
POST /engines/{name}/drain    it gets nothing new and ends what it has
POST /engines/{name}/resume   it gets requests again
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from kvhearth.router import replies
from kvhearth.router.replies import Refused

if TYPE_CHECKING:
    from kvhearth.router.client import Request
    from kvhearth.router.engines import Engine
    from kvhearth.router.fleet import Fleet

PREFIX = b"/engines"


def is_for_operator(path: bytes) -> bool:
    """Whether the path is one of these."""
    return path == PREFIX or path.startswith(PREFIX + b"/")


class OperatorPages:
    """Of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def page(self, request: Request) -> replies.Reply:
        """The answer to a request with the operator's key; raises Refused."""
        if request.path == PREFIX:
            if request.method not in {b"GET", b"HEAD"}:
                raise _not_allowed(b"GET, HEAD")
            engines = [_shown(engine) for engine in self._fleet.engines]
            leaving = [engine.name for engine in self._fleet.leaving]
            return _json({"engines": engines, "leaving": leaving})
        name, _, action = request.path.removeprefix(PREFIX + b"/").rpartition(b"/")
        if action not in {b"drain", b"resume"}:
            raise Refused(replies.error(404, "there is no such route: drain or resume an engine", "no_route"))
        if request.method != b"POST":
            raise _not_allowed(b"POST")
        engine = self._fleet.engine(unquote(name.decode("latin-1")))
        if engine is None:
            raise Refused(replies.error(404, "there is no engine of that name", "no_engine"))
        self._fleet.drain(engine, drained=action == b"drain")
        return _json(_shown(engine))


def _shown(engine: Engine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "url": engine.member.url,
        "role": engine.member.role,
        "state": engine.state,
        "models": sorted(engine.models or engine.member.models),
        "requests_in_flight": engine.requests_in_flight,
        "tokens_in_flight": engine.tokens_in_flight,
        "may_have_requests": engine.capacity.most,
        "breaker": {"state": engine.breaker.state, "opened": engine.breaker.opened},
        "targets": [
            {
                "name": target.name,
                "requests_in_flight": target.requests_in_flight,
                "prefill_tokens": target.prefill_tokens,
                "running": target.running,
                "waiting": target.waiting,
                "ttft_factor": target.ttft_factor,
            }
            for target in engine.targets
        ],
    }


def _json(page: dict[str, Any]) -> replies.Reply:
    return replies.Reply(200, msgspec.json.encode(page))


def _not_allowed(methods: bytes) -> Refused:
    extra = b"allow: %b\r\n" % methods
    return Refused(replies.error(405, "this route does not take this method", "bad_method", extra=extra))
