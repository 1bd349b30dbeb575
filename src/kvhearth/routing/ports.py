"""The border of routing: what a policy sees of a request and of the engines, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class RouteRequest(NamedTuple):
    """What routing needs of a request.

    ``prefix_hashes`` are chained hashes over fixed-size pieces of the prompt's text: equal hash = equal text up to
    there. ``prompt_tokens`` is exact or an estimate, used for load. ``session`` is what a client said keeps requests
    together ("" = nothing). ``block_keys`` are chained hashes over each full block of ``block_tokens`` token ids
    (`routing.chain`), so that equal keys mean equal KV; without token ids there are none, and ``unkeyed`` says why.
    """

    model: str
    prefix_hashes: Sequence[int]
    prompt_tokens: int
    session: str = ""
    block_keys: Sequence[int] = ()
    block_tokens: int = 0
    unkeyed: str = ""


class EngineView(NamedTuple):
    """A routable target at this moment: an engine, or one data-parallel rank of it.

    ``requests_in_flight`` and ``tokens_in_flight`` are the load that this router has on it. ``prefill_tokens`` are the
    prompt tokens that this router sent there, that it believes must be computed, and whose first token has not come
    yet. ``waiting`` and ``running`` are requests by the engine's own account, whoever sent them, as of its last report.
    ``ttft_factor`` is observed over predicted time to first token there lately (1.0 = as predicted).
    """

    name: str
    requests_in_flight: int
    tokens_in_flight: int
    prefill_tokens: int = 0
    waiting: int = 0
    running: int = 0
    ttft_factor: float = 1.0


class Hits(NamedTuple):
    """Leading tokens of a prompt that a target need not compute, by where their KV lies; they add up."""

    hbm: int = 0
    dram: int = 0
    store: int = 0


class Decision(NamedTuple):
    """An engine, or a named refusal (exactly one of the two), with the reason in words.

    ``matched`` is how many leading prefix hashes the policy believes the engine has. ``hits`` are the tokens that
    kv-aware expects not to be computed, ``predicted_seconds`` its time to first token (0.0 = no prediction), and
    ``miss_reason`` why it expects no hit ("" = it does, or does not look for any).
    """

    engine: str | None
    refusal: str | None = None
    matched: int = 0
    reason: str = ""
    hits: Hits = Hits()
    predicted_seconds: float = 0.0
    miss_reason: str = ""


class Policy(Protocol):
    """Picks an engine. Synchronous, total, allocation-light; state is bounded; no clock, no socket."""

    name: str

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """Decide for one request among the engines that serve its model and are healthy (possibly none)."""

    def engine_gone(self, engine: str) -> None:
        """Forget what is known of an engine that left or lost its cache."""


class Holders(Protocol):
    """What a policy asks of the KV index: see `routing.index`."""

    def match(self, keys: Sequence[int], targets: Sequence[str]) -> list[Hits]:
        """For each target, its leading hits **in blocks** among ``keys``."""

    def speculate(self, target: str, keys: Sequence[int]) -> None:
        """A request with these keys was just sent to the target, which will hold them in HBM soon."""

    def silence(self, target: str) -> str:
        """Why the index knows nothing of the target (``no_events``, ``stale``, …); "" when it does know."""
