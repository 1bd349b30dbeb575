"""What users send: scripts of turns whose text is named by segments, so that content needs no tokens to be compared.

A `Segment` stands for a run of words made from a seed. The same workload can be played in virtual time (`cluster`,
from segment names alone) and over HTTP (`load`, from the text that the segments stand for); both see the same shared
prefixes because equal segments are equal text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

WORD_BYTES = 5
"""A word is a space and four letters: five bytes, one token of the emulator's alphabet (`engine.tokens`)."""

_MASK = (1 << 64) - 1
_OUTPUT = 0x6F7574  # keeps generated text apart from every prompt segment


class Segment(NamedTuple):
    """The first ``tokens`` words of the text that ``seed`` (0 ≤ seed < 2**64) stands for."""

    seed: int
    tokens: int

    def text(self) -> str:
        """The words, each `WORD_BYTES` long. A longer segment of the same seed starts with the same text."""
        letters = np.random.Generator(np.random.PCG64(self.seed)).integers(
            97, 123, size=(self.tokens, 4), dtype=np.uint8
        )
        return np.hstack([np.full((self.tokens, 1), 32, dtype=np.uint8), letters]).tobytes().decode("ascii")


class Turn(NamedTuple):
    """One request of a user.

    Args:
        segments: the prompt, or what is added to it when ``continues``.
        output_tokens: tokens to generate (≥ 1).
        delay_ns: wait between the end of the user's previous turn (or the user's start) and this one.
        continues: the prompt begins with the previous turn's prompt and output (a conversation).
    """

    segments: tuple[Segment, ...]
    output_tokens: int
    delay_ns: int = 0
    continues: bool = False


class User(NamedTuple):
    """Turns played one after another, the first at ``start_ns`` plus its delay."""

    name: str
    tenant: str
    start_ns: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as good: time to first token, and mean time per token after it, in seconds."""

    ttft_seconds: float = 2.0
    tpot_seconds: float = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """Users and the service level they expect. ``note`` says in words what it is and what was left out of it."""

    name: str
    users: tuple[User, ...]
    slo: Slo = field(default_factory=Slo)
    note: str = ""

    @property
    def requests(self) -> int:
        """Number of requests when every turn is played."""
        return sum(len(user.turns) for user in self.users)

    @property
    def longest_tokens(self) -> int:
        """Prompt plus output of the longest request, in tokens."""
        return max((total_tokens(prompt) + turn.output_tokens for prompt, turn in self.prompts()), default=0)

    def prompts(self) -> Iterator[tuple[tuple[Segment, ...], Turn]]:
        """Every request's whole prompt beside its turn."""
        for user in self.users:
            conversation: tuple[Segment, ...] = ()
            for turn in user.turns:
                prompt = prompt_of(conversation, turn)
                yield prompt, turn
                conversation = (*prompt, output_segment(prompt, turn.output_tokens))

    def with_users(self, count: int) -> Workload:
        """The same workload with ``count`` of its users, drawn evenly, in order: less concurrency, the same shapes."""
        drawn = np.sort(np.random.default_rng(0).permutation(len(self.users))[:count])
        return Workload(self.name, tuple(self.users[i] for i in drawn), self.slo, self.note)


def prompt_of(conversation: tuple[Segment, ...], turn: Turn) -> tuple[Segment, ...]:
    """The whole prompt of a turn after ``conversation`` (all prompts and outputs before it)."""
    return (*conversation, *turn.segments) if turn.continues else turn.segments


def output_segment(prompt: tuple[Segment, ...], tokens: int) -> Segment:
    """What the engine generates for a prompt: the same prompt always gets the same words."""
    return Segment(hash((_OUTPUT, *prompt)) & _MASK, tokens)


def total_tokens(segments: Iterable[Segment]) -> int:
    """Tokens of the segments together."""
    return sum(segment.tokens for segment in segments)


def content_chain(segments: Sequence[Segment], unit: int, scale: int = 1) -> list[int]:
    """Chained hashes of every full ``unit`` of the text that the segments make, without making the text.

    With ``scale`` 1 a unit is counted in tokens (the engine's blocks); with ``scale`` `WORD_BYTES` in bytes (the
    router's pieces). Two chains agree up to the unit in which their texts first differ. Hashes are below 2**64.
    """
    chain: list[int] = []
    parent = unit
    pending: list[int] = []
    room = unit
    for seed, tokens in segments:
        length, at = tokens * scale, 0
        while length - at >= room:
            parent = hash((parent, seed, at, *pending)) & _MASK
            chain.append(parent)
            at, room = at + room, unit
            pending.clear()
        if at < length:
            pending += (seed, at, length)
            room -= length - at
    return chain
