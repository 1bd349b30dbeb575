"""Predicts how long a request waits for its first token on a target, and learns from what it really waited.

No policy and no clock: `policies.kv_aware` compares the predictions, whoever dispatches tells what came true.
"""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple, Protocol

from kvhearth.cost import CostModel
from kvhearth.errors import UserError
from kvhearth.routing.ports import EngineView, Hits

QUEUE_CHUNK_TOKENS = 8192
"""Prompts queued ahead are taken to cost, a token, what one of this length does: their own lengths are not known. It is
vLLM's usual ``max_num_batched_tokens``."""

DEFAULT_TOKENS_PER_SECOND = 10_000.0
"""Prefill rate of an engine of which nothing is known, until its first answers: the order of an 8B model on one data
centre GPU."""

DRAM_SPEEDUP, STORE_SPEEDUP = 8.0, 3.0
"""Without a cost model, KV is loaded so many times faster than it is computed: what `cost.CostModel` gives for an 8B
model on an H100 behind PCIe 5 and behind 100 Gbit/s Ethernet, rounded down."""

DECODE_TOKEN_SHARE = 1 / 800
"""Without a cost model: time of reading one token's KV in a decode step over that of computing it in prefill; what
`cost.CostModel` gives for an 8B model on an H100, rounded."""

NOISE_SECONDS = 0.02
"""Added to both sides of observed / predicted, so that milliseconds of network do not count as a slow engine."""

RATIO_LIMIT = 8.0
"""A single observation counts as at most so many times too slow or too fast."""

FACTOR_LIMIT = 4.0
"""A target's correction stays within [1 / limit, limit]."""

GAIN = 0.1
"""Weight of a new observation in a moving average."""

FADE = 0.99
"""What is left of a correction's logarithm after an observation of *another* target: who gets no requests because it
was slow is tried again."""


class TtftCost(Protocol):
    """What the parts of a first token cost on a target of one kind. All times in seconds."""

    def compute_seconds(self, new: int, cached: int) -> float:
        """Computing ``new`` prompt tokens after ``cached`` ones."""

    def queue_seconds(self, tokens: int) -> float:
        """Computing ``tokens`` of other requests' prompts, of unknown lengths."""

    def load_seconds(self, dram: int, store: int) -> float:
        """Bringing so many tokens' KV into HBM from the engine's DRAM and from the store."""

    def context_seconds(self, tokens: int) -> float:
        """What ``tokens`` of other requests' context add to one decode step."""

    def learn(self, work_seconds: float, seconds: float) -> None:
        """Work that should have taken ``work_seconds`` by this cost took ``seconds``."""


class ModelledCost:
    """From the cost model of the deployment.

    Args:
        model: what engines of this shape cost.
        store_link: name of the link to the store.
        op_bytes: bytes of one transfer operation between store and engine (a chunk); 0 = a block.

    Raises:
        UserError: no link of that name.
    """

    def __init__(self, model: CostModel, store_link: str = "ethernet-100g", op_bytes: int = 0) -> None:
        self._model = model
        self._link = model.link(store_link)
        self._op_bytes = op_bytes or model.kv_bytes(model.block_size)
        self._queue_token_seconds = model.prefill_ns(QUEUE_CHUNK_TOKENS) / QUEUE_CHUNK_TOKENS / 1e9
        step_ns = model.step_ns((), 1, QUEUE_CHUNK_TOKENS) - model.step_ns((), 1, 0)
        self._context_token_seconds = step_ns / QUEUE_CHUNK_TOKENS / 1e9

    def compute_seconds(self, new: int, cached: int) -> float:
        """See `TtftCost`."""
        return self._model.prefill_ns(new, cached) / 1e9

    def queue_seconds(self, tokens: int) -> float:
        """See `TtftCost`."""
        return tokens * self._queue_token_seconds

    def load_seconds(self, dram: int, store: int) -> float:
        """See `TtftCost`. From the store, KV passes the engine's DRAM."""
        model = self._model
        load_ns = model.dram_load_ns(model.kv_bytes(dram + store)) if dram or store else 0
        if store:
            load_ns += model.transfer_ns(model.kv_bytes(store), self._link, self._op_bytes)
        return load_ns / 1e9

    def context_seconds(self, tokens: int) -> float:
        """See `TtftCost`."""
        return tokens * self._context_token_seconds

    def learn(self, work_seconds: float, seconds: float) -> None:
        """The model stays as it is; what differs a target is in the target's correction."""


class LearnedCost:
    """Without a cost model: one prefill rate, learned from what was observed, and loads in proportion to it.

    Args:
        tokens_per_second: where to begin.
    """

    LIMITS = (1.0, 1e7)
    """Tokens a second between which the rate stays."""

    def __init__(self, tokens_per_second: float = DEFAULT_TOKENS_PER_SECOND) -> None:
        low, high = self.LIMITS
        if not low <= tokens_per_second <= high:
            raise UserError(
                f"{tokens_per_second} is out of range",
                where="prefill tokens per second",
                remedy=f"use {low:g} up to {high:g}",
            )
        self.tokens_per_second = tokens_per_second
        self._learned = 0

    def compute_seconds(self, new: int, cached: int) -> float:
        """See `TtftCost`; attention to the cached tokens is left out."""
        return new / self.tokens_per_second

    def queue_seconds(self, tokens: int) -> float:
        """See `TtftCost`."""
        return tokens / self.tokens_per_second

    def load_seconds(self, dram: int, store: int) -> float:
        """See `TtftCost`."""
        return (dram / DRAM_SPEEDUP + store / STORE_SPEEDUP) / self.tokens_per_second

    def context_seconds(self, tokens: int) -> float:
        """See `TtftCost`."""
        return tokens * DECODE_TOKEN_SHARE / self.tokens_per_second

    def learn(self, work_seconds: float, seconds: float) -> None:
        """Move the rate towards what was seen: the first observations weigh most, later ones `GAIN`."""
        self._learned += 1
        gain = max(GAIN, 1 / self._learned)
        ratio = (work_seconds + NOISE_SECONDS) / (seconds + NOISE_SECONDS)
        low, high = self.LIMITS
        self.tokens_per_second = min(high, max(low, self.tokens_per_second * ratio**gain))


class Correction:
    """Observed over predicted time, a target: a moving average of the logarithm, so that twice too slow and twice too
    fast weigh the same. One entry a target that has been observed, until it is forgotten."""

    def __init__(self) -> None:
        self._observed = 0
        self._logs: dict[str, tuple[float, int]] = {}

    def factor(self, target: str) -> float:
        """What to multiply a prediction for the target with; 1.0 for one never observed."""
        entry = self._logs.get(target)
        if entry is None:
            return 1.0
        return exp(entry[0] * FADE ** (self._observed - entry[1]))

    def observe(self, target: str, predicted_seconds: float, observed_seconds: float) -> None:
        """A first token came after ``observed_seconds`` where ``predicted_seconds`` (uncorrected) were expected."""
        ratio = (observed_seconds + NOISE_SECONDS) / (predicted_seconds + NOISE_SECONDS)
        seen = log(min(RATIO_LIMIT, max(1 / RATIO_LIMIT, ratio)))
        before = log(self.factor(target))
        self._observed += 1
        limit = log(FACTOR_LIMIT)
        self._logs[target] = (min(limit, max(-limit, before + GAIN * (seen - before))), self._observed)

    def forget(self, target: str) -> None:
        """The target left, or is another one now."""
        self._logs.pop(target, None)


class Prediction(NamedTuple):
    """Time to first token by its parts, in seconds as the cost has them, and the factor that corrects their sum."""

    queue_seconds: float
    load_seconds: float
    compute_seconds: float
    factor: float = 1.0

    @property
    def seconds(self) -> float:
        """The prediction."""
        return (self.queue_seconds + self.load_seconds + self.compute_seconds) * self.factor


class Predictor:
    """Time to first token: prefill queued ahead, loads from each tier and computing the rest, by the target's factor.

    Queued ahead are the prompts that this router sent (`EngineView.prefill_tokens`), and, by the engine's own account,
    waiting requests that others sent: those beyond ``requests_in_flight``, each of the mean length seen here.

    Args:
        cost: of one kind of engine; None = learn it.
    """

    def __init__(self, cost: TtftCost | None = None) -> None:
        self.cost: TtftCost = cost or LearnedCost()
        self._correction = Correction()
        self._mean_new_tokens = 0.0

    def predict(self, view: EngineView, prompt_tokens: int, hits: Hits) -> Prediction:
        """For a prompt of which ``hits`` (tokens) are there already."""
        cached = hits.hbm + hits.dram + hits.store
        cost = self.cost
        return Prediction(
            cost.queue_seconds(self.queued_tokens(view)),
            cost.load_seconds(hits.dram, hits.store),
            cost.compute_seconds(max(1, prompt_tokens - cached), cached),
            view.ttft_factor,
        )

    def queued_tokens(self, view: EngineView) -> int:
        """Prompt tokens to be computed there before a request that comes now."""
        foreign = view.waiting + view.running - view.requests_in_flight
        if foreign <= 0 or not view.waiting:
            return view.prefill_tokens
        return view.prefill_tokens + int(min(foreign, view.waiting) * self._mean_new_tokens)

    def observe(self, view: EngineView, prompt_tokens: int, hits: Hits, seconds: float) -> float:
        """The first token of a request came ``seconds`` after it was dispatched; returns the target's factor now.

        Args:
            view: the target as it was when the decision was made.
            prompt_tokens: of the request.
            hits: what the decision expected (`Decision.hits`).
        """
        self.cost.learn(self._uncorrected_seconds(view, prompt_tokens, hits), seconds)
        # By what is known now: what all targets have in common is the cost's, and no reason to prefer one observed.
        self._correction.observe(view.name, self._uncorrected_seconds(view, prompt_tokens, hits), seconds)
        new = max(1, prompt_tokens - sum(hits))
        self._mean_new_tokens += GAIN * (new - self._mean_new_tokens) if self._mean_new_tokens else new
        return self._correction.factor(view.name)

    def _uncorrected_seconds(self, view: EngineView, prompt_tokens: int, hits: Hits) -> float:
        return self.predict(view, prompt_tokens, hits)._replace(factor=1.0).seconds

    def factor(self, target: str) -> float:
        """Observed over predicted lately: `EngineView.ttft_factor`. It nears 1 again as others are observed."""
        return self._correction.factor(target)

    def forget(self, target: str) -> None:
        """The target left, or lost what made it fast or slow."""
        self._correction.forget(target)
