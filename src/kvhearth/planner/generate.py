"""Workloads made from a seed: the shapes that people serve, with their sharing of prompts.

Lengths are log-normal around a median, cut to a range. Every number that shapes a workload is a field of its recipe, so
that ``kvhearth simulate`` and a test can say what they ran.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvhearth.errors import UserError
from kvhearth.planner.workload import Segment, Slo, Turn, User, Workload

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Length:
    """Log-normal token counts: ``median``, ``sigma`` of the logarithm, cut to ``[low, high]``."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        """One length in tokens."""
        return int(np.clip(round(rng.lognormal(np.log(self.median), self.sigma)), self.low, self.high))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A workload's shape.

    Args:
        users: people who each play ``turns`` turns one after another.
        tenants: groups of users with a system prompt of their own behind a ``common_tokens`` one that all share.
        common_tokens: instructions that every tenant's prompt begins with.
        system_tokens: further tokens of each tenant's own system prompt.
        turns: turns of a user.
        conversation: later turns continue the first (chat, agents); otherwise each is a fresh prompt.
        question: new text of a turn.
        answer: generated tokens of a turn.
        think_seconds: mean wait between turns (exponential); 0 = none.
        ramp_seconds: users start evenly over this time, so that concurrency rises.
        documents: RAG: number of documents, of which each turn cites ``documents_per_turn`` in order of popularity
            (Zipf); 0 = none.
        document_tokens: length of a document.
        documents_per_turn: documents a turn cites.
    """

    users: int
    turns: int
    question: Length
    answer: Length
    tenants: int = 1
    common_tokens: int = 0
    system_tokens: int = 0
    conversation: bool = False
    think_seconds: float = 0.0
    ramp_seconds: float = 0.0
    documents: int = 0
    document_tokens: int = 0
    documents_per_turn: int = 0
    slo: Slo = field(default_factory=Slo)


RECIPES: dict[str, tuple[str, Recipe]] = {
    "multi-tenant": (
        "40 tenants with a 2k-token system prompt each, users in conversations, concurrency rising until HBM is full",
        Recipe(
            users=80,
            turns=7,
            question=Length(350, 0.5, 100, 2000),
            answer=Length(130, 0.7, 30, 600),
            tenants=40,
            common_tokens=256,
            system_tokens=1792,
            conversation=True,
            think_seconds=1.0,
            ramp_seconds=10.0,
        ),
    ),
    "chat": (
        "long conversations of many users over one short system prompt",
        Recipe(
            users=160,
            turns=6,
            question=Length(120, 0.7, 10, 1000),
            answer=Length(200, 0.5, 20, 600),
            system_tokens=200,
            conversation=True,
            think_seconds=6.0,
            ramp_seconds=30.0,
        ),
    ),
    "rag": (
        "questions over popular documents that do not fit into HBM together",
        Recipe(
            users=64,
            turns=6,
            question=Length(60, 0.5, 10, 300),
            answer=Length(150, 0.4, 30, 400),
            system_tokens=300,
            documents=120,
            document_tokens=3000,
            documents_per_turn=2,
            think_seconds=1.0,
            ramp_seconds=15.0,
        ),
    ),
    "no-reuse": (
        "short prompts that share nothing, at a concurrency that HBM holds",
        Recipe(
            users=48,
            turns=8,
            question=Length(220, 0.5, 40, 700),
            answer=Length(120, 0.4, 30, 300),
            think_seconds=0.5,
            ramp_seconds=5.0,
        ),
    ),
}
"""Name → (what it is in words, recipe)."""


def generate(name: str, seed: int = 0, recipe: Recipe | None = None) -> Workload:
    """The workload of a recipe; the same name, recipe and seed give the same workload.

    Raises:
        UserError: no recipe of that name.
    """
    if name not in RECIPES:
        raise UserError(f"unknown workload {name!r}", where="--workload", remedy=f"use one of {', '.join(RECIPES)}")
    note, known = RECIPES[name]
    shape = recipe or known
    rng = np.random.default_rng([seed, sorted(RECIPES).index(name)])
    make = _Seeds(rng)
    common, systems = make(shape.common_tokens), [make(shape.system_tokens) for _ in range(shape.tenants)]
    documents = [make(shape.document_tokens) for _ in range(shape.documents)]
    users = []
    for index in range(shape.users):
        tenant = index % shape.tenants
        system = tuple(s for s in (common, systems[tenant]) if s.tokens)
        turns = tuple(_turn(shape, rng, make, system, documents, first=t == 0) for t in range(shape.turns))
        start_ns = int(shape.ramp_seconds * SECOND_NS * index / shape.users)
        users.append(User(f"user-{index}", f"tenant-{tenant}", start_ns, turns))
    return Workload(name, tuple(users), shape.slo, note)


def _turn(
    shape: Recipe,
    rng: np.random.Generator,
    make: Callable[[int], Segment],
    system: tuple[Segment, ...],
    documents: list[Segment],
    *,
    first: bool,
) -> Turn:
    question = make(shape.question.draw(rng))
    cited = _cite(documents, shape.documents_per_turn, rng) if documents else ()
    continues = shape.conversation and not first
    segments = (*cited, question) if continues else (*system, *cited, question)
    think_ns = int(rng.exponential(shape.think_seconds) * SECOND_NS) if shape.think_seconds and not first else 0
    return Turn(segments, shape.answer.draw(rng), think_ns, continues)


def _cite(documents: list[Segment], count: int, rng: np.random.Generator) -> tuple[Segment, ...]:
    weights = 1.0 / np.arange(1, len(documents) + 1)
    chosen = rng.choice(len(documents), size=min(count, len(documents)), replace=False, p=weights / weights.sum())
    return tuple(documents[i] for i in sorted(chosen))


class _Seeds:
    """Segments that differ from one another."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, tokens: int) -> Segment:
        return Segment(int(self._rng.integers(1 << 62)), tokens)
