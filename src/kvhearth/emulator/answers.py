"""Calls in progress: what the engine loop has produced for each prompt and what its HTTP handler has taken of it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from kvhearth.emulator.protocol import Generation, Prompt
from kvhearth.emulator.vllm_hashes import Adapter, VllmHasher
from kvhearth.engine.ports import EngineRequest, Finished
from kvhearth.engine.tokens import WORD_BYTES, block_hashes, decode, output_tokens

HashBlocks = Callable[[list[int], int, str, Adapter | None], list[int]]
"""Token ids, tokens a block, salt, adapter → the chained hashes of the full blocks."""


def hash_quickly(token_ids: list[int], block_size: int, salt: str, adapter: Adapter | None) -> list[int]:
    """Hashes that nobody outside sees."""
    apart = salt if adapter is None else f"{adapter.name}\0{adapter.path}\0{salt}"
    return block_hashes(token_ids, block_size, apart)


class Hashing:
    """How prompts are turned into what the engine model takes.

    Args:
        block_size: tokens a block.
        hasher: vLLM's hashes; None = quicker ones.
        keep_tokens: answers keep their token ids, for KV events.
    """

    def __init__(self, block_size: int, hasher: VllmHasher | None, *, keep_tokens: bool) -> None:
        self.block_size = block_size
        self.keep_tokens = keep_tokens
        self.hash_blocks: HashBlocks = hash_quickly if hasher is None else hasher.hashes


class Answer:
    """The answer to one prompt. The loop raises ``produced``; the handler takes text and sets ``wake_at``.

    Attributes:
        produced: tokens that exist.
        wake_at: the handler wants to run when ``produced`` reaches this.
        finished: the engine's account, with the last token.
        token_ids: of prompt and output, 4 bytes each; empty unless they are kept.
        adapter, salt: what else its KV depends on.
        arrival_ns, scheduled_ns, first_ns, last_ns: emulated times of arrival, of first being scheduled, of the first
            and of the latest token; -1 = not yet.
    """

    __slots__ = (
        "adapter",
        "arrival_ns",
        "call",
        "finish_reason",
        "finished",
        "first_ns",
        "index",
        "last_ns",
        "produced",
        "request",
        "salt",
        "scheduled_ns",
        "taken",
        "text",
        "token_ids",
        "wake_at",
    )

    def __init__(
        self, call: Call, index: int, prompt: Prompt, generation: Generation, hashing: Hashing, interval: int
    ) -> None:
        output = output_tokens(prompt.seed, prompt.output_tokens)
        token_ids = prompt.token_ids + output
        self.adapter = generation.adapter
        self.salt = generation.salt
        self.token_ids = array("I", token_ids if hashing.keep_tokens else ())
        hashes = hashing.hash_blocks(token_ids, hashing.block_size, self.salt, self.adapter)
        self.call = call
        self.index = index
        self.finish_reason = prompt.finish_reason
        self.text = decode(output)
        self.request = EngineRequest(f"{call.call_id}-{index}", len(prompt.token_ids), prompt.output_tokens, hashes)
        self.produced = 0
        self.taken = 0
        self.wake_at = 1 if interval else prompt.output_tokens
        self.finished: Finished | None = None
        self.arrival_ns = -1
        self.scheduled_ns = -1
        self.first_ns = -1
        self.last_ns = -1

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def complete(self) -> bool:
        """All tokens exist."""
        return self.produced >= self.request.output_tokens

    def take(self, interval: int) -> str:
        """Text of the tokens produced since the last take; asks to be woken after ``interval`` more, or the last."""
        text = self.text[self.taken * WORD_BYTES : self.produced * WORD_BYTES]
        self.taken = self.produced
        self.wake_at = min(self.taken + interval, self.request.output_tokens)
        return text

    def usage(self) -> dict[str, object]:
        """OpenAI's ``usage`` of this prompt so far."""
        return _usage([self])


class Call:
    """One HTTP call: an answer a prompt, and the wake-up of its handler.

    Args:
        hashing: of the engine that will answer.
        interval: tokens a chunk when streaming; 0 = wake only when an answer is complete.
    """

    def __init__(self, call_id: str, generation: Generation, hashing: Hashing, interval: int) -> None:
        self.call_id = call_id
        self.model = generation.model
        self.chat = generation.chat
        self.stream = generation.stream
        self.options = generation.options
        self.max_tokens = generation.max_tokens
        self.await_seconds = generation.await_seconds
        self.error: str | None = None
        self.gone = False
        self._wake = asyncio.Event()
        self.answers = [
            Answer(self, index, prompt, generation, hashing, interval)
            for index, prompt in enumerate(generation.prompts)
        ]

    @property
    def complete(self) -> bool:
        """Every answer is."""
        return all(answer.complete for answer in self.answers)

    def wake(self) -> None:
        """Let the handler run."""
        self._wake.set()

    def fail(self, error: str) -> None:
        """The engine cannot go on with this call."""
        self.error = error
        self.wake()

    def abandon(self) -> None:
        """The client went away."""
        self.gone = True
        self.wake()

    async def news(self) -> None:
        """Wait for tokens, failure or the client's leaving. The engine's own progress bounds the wait."""
        await self._wake.wait()
        self._wake.clear()

    def total_usage(self) -> dict[str, object]:
        """OpenAI's ``usage`` over all prompts so far."""
        return _usage(self.answers)


def _usage(answers: list[Answer]) -> dict[str, object]:
    prompt_tokens = sum(answer.request.prompt_tokens for answer in answers)
    produced = sum(answer.produced for answer in answers)
    ended = [answer for answer in answers if answer.finished is not None]
    cached = sum(done.prompt_tokens - done.sources.compute for answer in ended if (done := answer.finished))
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + produced,
        "completion_tokens": produced,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
