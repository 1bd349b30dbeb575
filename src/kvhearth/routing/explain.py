"""One decision in words and numbers, for whoever asks why a request went where it went. Explains; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvhearth.routing.policies.kv_aware import Score
from kvhearth.routing.ports import Decision, EngineView, Hits, RouteRequest

SOURCES = ("HBM", "its DRAM", "the store")

MISS_WORDS = {
    "holder_busy": "another target holds part of it, but would be later",
    "multi_modal": "it is not text alone",
    "no_events": "the target sends no KV events",
    "no_tokens": "its token ids are not known",
    "not_held": "no target holds its beginning",
    "short_prompt": "it is shorter than a block",
    "stale": "the target's KV events have stopped",
    "tokenizer_missing": "there is no tokenizer for its model",
}
"""Miss reasons in words; one that is not here stands for itself."""

OTHERS_SHOWN = 3


def explain(
    decision: Decision, request: RouteRequest, views: Sequence[EngineView], scores: Sequence[Score] = ()
) -> dict[str, Any]:
    """What is known of a decision, as plain JSON values; ``text`` says it as a paragraph.

    Args:
        decision: what the policy answered.
        request: what it was asked.
        views: the targets as they were then.
        scores: of policy kv-aware (`KvAware.scores` of the same request and views). Made later than the decision, their
            hits are those of now; for the chosen target the decision's own are shown.
    """
    by_target = {score.target: score for score in scores}
    hits = decision.hits
    return {
        "text": _paragraph(decision, request, views, scores),
        "engine": decision.engine,
        "refusal": decision.refusal,
        "reason": decision.reason,
        "miss_reason": decision.miss_reason,
        "request": {
            "model": request.model,
            "session": request.session,
            "prompt_tokens": request.prompt_tokens,
            "blocks": len(request.block_keys),
            "block_tokens": request.block_tokens,
            "pieces": len(request.prefix_hashes),
            "unkeyed": request.unkeyed,
        },
        "hits": {**hits._asdict(), "compute": max(0, request.prompt_tokens - sum(hits))},
        "matched_pieces": decision.matched,
        "predicted_seconds": decision.predicted_seconds or None,
        "targets": [_target(view, by_target.get(view.name), decision) for view in views],
    }


def _target(view: EngineView, score: Score | None, decision: Decision) -> dict[str, Any]:
    shown: dict[str, Any] = {**view._asdict(), "chosen": view.name == decision.engine}
    if score is not None:
        found = decision.hits if shown["chosen"] else score.hits
        shown["hits"] = found._asdict()
        shown["crowd_seconds"] = score.crowd_seconds
        shown["predicted"] = {"seconds": decision.predicted_seconds}
        if not shown["chosen"]:
            shown["predicted"] = {**score.prediction._asdict(), "seconds": score.prediction.seconds}
    return shown


def _paragraph(decision: Decision, request: RouteRequest, views: Sequence[EngineView], scores: Sequence[Score]) -> str:
    what = f"A request for {request.model!r} with {request.prompt_tokens:,} prompt tokens"
    if request.session:
        what += f" of session {request.session!r}"
    if decision.engine is None:
        return f"{what} was refused ({decision.refusal}): {decision.reason}."
    sentences = [f"{what} went to {decision.engine}, of {len(views)}: {decision.reason}."]
    sentences += _expected(decision, request)
    chosen = next((view for view in views if view.name == decision.engine), None)
    if chosen is not None:
        sentences.append(_load(chosen))
    sentences += _others(decision, scores)
    return " ".join(sentences)


def _expected(decision: Decision, request: RouteRequest) -> list[str]:
    sentences = []
    if any(decision.hits):
        computed = max(0, request.prompt_tokens - sum(decision.hits))
        sentences.append(f"Expected there: {_held(decision.hits)}; {computed:,} tokens are left to compute.")
    elif decision.miss_reason:
        words = MISS_WORDS.get(decision.miss_reason, decision.miss_reason)
        sentences.append(f"No hit is expected by token ids ({decision.miss_reason}): {words}.")
    if decision.matched:
        sentences.append(f"Its text matches {decision.matched:,} of {len(request.prefix_hashes):,} pieces sent there.")
    if decision.predicted_seconds:
        sentences.append(f"The first token is predicted after {decision.predicted_seconds:.3f} s.")
    return sentences


def _load(view: EngineView) -> str:
    text = (
        f"{view.name} had {view.requests_in_flight:,} requests with {view.tokens_in_flight:,} prompt tokens in flight, "
        f"{view.prefill_tokens:,} tokens of them to be computed first"
    )
    if view.running or view.waiting:
        text += f" (by its own account {view.running:,} running and {view.waiting:,} waiting)"
    if view.ttft_factor != 1.0:
        text += f", and lately took {view.ttft_factor:.2f} times the predicted time"
    return text + "."


def _others(decision: Decision, scores: Sequence[Score]) -> list[str]:
    others = sorted((s for s in scores if s.target != decision.engine), key=lambda s: s.seconds)
    if not others:
        return []
    shown = "; ".join(
        f"{score.target} {score.prediction.seconds:.3f} s "
        f"({_held(score.hits)}, {score.prediction.queue_seconds:.3f} s of queue)"
        for score in others[:OTHERS_SHOWN]
    )
    left = len(others) - OTHERS_SHOWN
    return [f"The next best: {shown}{f'; and {left} more' if left > 0 else ''}."]


def _held(hits: Hits) -> str:
    held = [f"{tokens:,} tokens in {words}" for words, tokens in zip(SOURCES, hits, strict=True) if tokens]
    return ", ".join(held) or "nothing held"
