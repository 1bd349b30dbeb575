"""Reads from a response's end what the engine says it cost in tokens. Looks at a response once, when it is over."""

from __future__ import annotations

import re
from typing import NamedTuple

TAIL_BYTES = 8192
"""How far from a response's end its usage is searched for: it comes last in a stream, and nearly so in a JSON body."""

_PROMPT = (b"prompt_tokens", b"input_tokens")
_COMPLETION = (b"completion_tokens", b"output_tokens")
_COUNT = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens|cache_read_input_tokens)"'
    rb"\s*:\s*(\d{1,12})"
)


class Usage(NamedTuple):
    """Tokens of one response, as its engine counted them. ``cached`` of the ``prompt`` ones were not computed; engines
    tell that only when asked to (vLLM: ``--enable-prompt-tokens-details``)."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


def read_usage(before: bytes, last: bytes) -> Usage | None:
    """The usage in the two last pieces of a response's body, or None when there is none.

    Completions, chat and embeddings name the counts ``prompt_tokens`` and ``completion_tokens``, responses and messages
    ``input_tokens`` and ``output_tokens``. In a text they could only stand with escaped quotes, which do not match.
    """
    tail = last if len(last) <= TAIL_BYTES else last[-TAIL_BYTES:]
    start = tail.rfind(b'"usage"')
    if start < 0 and before and len(tail) < TAIL_BYTES:
        tail = before[len(tail) - TAIL_BYTES :] + tail
        start = tail.rfind(b'"usage"')
    if start < 0:
        return None
    prompt = completion = cached = 0
    for name, digits in _COUNT.findall(tail, start):
        if name in _PROMPT:
            prompt = int(digits)
        elif name in _COMPLETION:
            completion = int(digits)
        else:
            cached = int(digits)
    return Usage(prompt, completion, cached) if prompt or completion else None
