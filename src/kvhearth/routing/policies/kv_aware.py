"""Sends a request where its first token is predicted soonest, from what the KV index says each target holds.

It asks the index and the predictor that it is given; how they know is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from kvhearth.errors import UserError
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.ports import Decision, EngineView, Hits, Holders, RouteRequest
from kvhearth.routing.ttft import Prediction, Predictor

NO_HITS = Hits()


@dataclass(frozen=True, slots=True)
class KvAwareSettings:
    """How predictions are compared.

    Args:
        decode_tokens: a target's load counts with what its requests' context adds to so many decode steps of the new
            one (about the length of an answer): the hot-spot guard for requests whose prefill costs next to nothing.
        displacement: tokens computed anew displace as many that the target has cached, so each counts as so many more
            to compute later. 0 looks at this request alone, and lets a short queue scatter copies of the same prefix
            until nothing else fits.
        tie_share, tie_seconds: targets within this share, or this many seconds, of the best count as equal; of equals
            the one with the fewest tokens in flight is taken, and of those any.
        prefix: the fall-back for requests without token ids.
    """

    decode_tokens: int = 128
    displacement: float = 1.0
    tie_share: float = 0.01
    tie_seconds: float = 0.001
    prefix: PrefixSettings = field(default_factory=PrefixSettings)

    def __post_init__(self) -> None:
        for name in ("decode_tokens", "displacement", "tie_share", "tie_seconds"):
            value = getattr(self, name)
            if not value >= 0:
                raise UserError(f"{value} is negative", where=f"policy kv-aware, {name}", remedy="use 0 or more")


class Score(NamedTuple):
    """One target's standing for a request. The lowest ``seconds`` wins.

    ``hits`` are in tokens; to the predicted time to first token comes what the target's other requests will cost this
    one while it decodes (``crowd_seconds``), and what computing will cost others whose KV it displaces
    (``displaced_seconds``); see `KvAwareSettings`.
    """

    target: str
    hits: Hits
    prediction: Prediction
    crowd_seconds: float
    displaced_seconds: float

    @property
    def seconds(self) -> float:
        """What is compared."""
        return self.prediction.seconds + self.crowd_seconds + self.displaced_seconds


class KvAware:
    """Lowest predicted time to first token, load counted in.

    Nothing gathers on the holder of a hot prefix: each request sent there lengthens the queue of which the next
    prediction is made, and is noted in the index at once, so that a second holder counts as one from its dispatch on.

    Args:
        holders: the KV index.
        predictor: time to first token of a target.
        rng: decides between equals; the same seed and calls give the same picks.
    """

    name = "kv-aware"

    def __init__(
        self,
        holders: Holders,
        predictor: Predictor,
        rng: Random | None = None,
        settings: KvAwareSettings | None = None,
    ) -> None:
        self.predictor = predictor
        self._holders = holders
        self._rng = rng or Random()
        self._settings = settings or KvAwareSettings()
        self._prefix = Prefix(self._settings.prefix)

    def pick(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        """The target to use, of which the index assumes from now on that it will hold this prompt.

        Refusal ``no_healthy_engine`` when there is none to choose from. Without block keys: as policy ``prefix``, and
        ``miss_reason`` says why there are none.
        """
        if not engines:
            return Decision(None, "no_healthy_engine", reason="no engine to choose from")
        if not request.block_keys and (request.unkeyed or not request.block_tokens):
            return self._by_text(request, engines)
        hits = self._hits(request, engines)
        index = self._best(request, engines, hits)
        chosen, found = engines[index], hits[index]
        predicted = self.predictor.predict(chosen, request.prompt_tokens, found)
        if request.block_keys:
            self._holders.speculate(chosen.name, request.block_keys)
        return Decision(
            chosen.name,
            reason="lowest predicted time to first token",
            hits=found,
            predicted_seconds=predicted.seconds,
            miss_reason="" if any(found) else self._why_no_hit(request, engines, hits, chosen),
        )

    def scores(self, request: RouteRequest, engines: Sequence[EngineView]) -> list[Score]:
        """What each target looks like for the request, in the order given; decides and changes nothing."""
        scores = []
        for view, found in zip(engines, self._hits(request, engines), strict=True):
            prediction = self.predictor.predict(view, request.prompt_tokens, found)
            displaced = prediction.compute_seconds * self._settings.displacement * view.ttft_factor
            scores.append(Score(view.name, found, prediction, self._crowd_seconds(view), displaced))
        return scores

    def engine_gone(self, engine: str) -> None:
        """Forget how fast it was, and what it was sent as text. What it holds is the index's to forget."""
        self.predictor.forget(engine)
        self._prefix.engine_gone(engine)

    def _by_text(self, request: RouteRequest, engines: Sequence[EngineView]) -> Decision:
        decision = self._prefix.pick(request, engines)
        return decision._replace(
            reason=f"no token ids, by text: {decision.reason}", miss_reason=request.unkeyed or "no_tokens"
        )

    def _hits(self, request: RouteRequest, engines: Sequence[EngineView]) -> list[Hits]:
        """Each target's hits in tokens. The last token of a prompt is always computed: there must be something to
        sample from."""
        keys, block, most = request.block_keys, request.block_tokens, request.prompt_tokens - 1
        if not keys:
            return [NO_HITS] * len(engines)
        hits = []
        for hbm, dram, store in self._holders.match(keys, [engine.name for engine in engines]):
            if not (hbm or dram or store):
                hits.append(NO_HITS)
            elif (hbm + dram + store) * block <= most:
                hits.append(Hits(hbm * block, dram * block, store * block))
            else:
                # In HBM a whole block less; what is loaded comes whole, but for that one token.
                from_hbm = min(hbm, most // block) * block
                from_dram = min(dram * block, most - from_hbm) if dram else 0
                hits.append(Hits(from_hbm, from_dram, min(store * block, most - from_hbm - from_dram) if store else 0))
        return hits

    def _best(self, request: RouteRequest, engines: Sequence[EngineView], hits: Sequence[Hits]) -> int:
        """Index of the target that wins."""
        predictor, cost = self.predictor, self.predictor.cost
        computing = 1 + self._settings.displacement
        work: dict[Hits, float] = {}  # most targets hold nothing, or the same
        seconds: list[float] = []
        for view, found in zip(engines, hits, strict=True):
            own = work.get(found)
            if own is None:
                cached = found.hbm + found.dram + found.store
                compute = cost.compute_seconds(max(1, request.prompt_tokens - cached), cached)
                own = work[found] = cost.load_seconds(found.dram, found.store) + compute * computing
            queued = cost.queue_seconds(predictor.queued_tokens(view))
            seconds.append((queued + own) * view.ttft_factor + self._crowd_seconds(view))
        least = min(seconds)
        limit = max(least * (1 + self._settings.tie_share), least + self._settings.tie_seconds)
        equals: list[int] = []
        for index, value in enumerate(seconds):
            if value <= limit:
                tokens = engines[index].tokens_in_flight
                if not equals or tokens < engines[equals[0]].tokens_in_flight:
                    equals = [index]
                elif tokens == engines[equals[0]].tokens_in_flight:
                    equals.append(index)
        return equals[0] if len(equals) == 1 else equals[int(self._rng.random() * len(equals))]

    def _crowd_seconds(self, view: EngineView) -> float:
        return self.predictor.cost.context_seconds(view.tokens_in_flight) * self._settings.decode_tokens

    def _why_no_hit(
        self, request: RouteRequest, engines: Sequence[EngineView], hits: Sequence[Hits], chosen: EngineView
    ) -> str:
        if not request.block_keys:
            return "short_prompt"
        if any(map(any, hits)):
            return "holder_busy"
        return self._holders.silence(chosen.name) or "not_held"
