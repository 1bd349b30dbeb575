"""Token ids of a prompt, and why there are none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple


class TokenIds(NamedTuple):
    """A prompt's ids; without any, ``reason`` says why: ``tokenizer_missing``, ``multi_modal``, ``shape`` (no engine
    tells how it makes ids of that), ``refused`` (the engine would not tell), ``unreachable`` or ``late``."""

    ids: Sequence[int]
    reason: str = ""


AskEngine = Callable[[str, dict[str, Any]], Awaitable[tuple[int, Any]]]
"""POSTs JSON to a path of an engine; the status and the decoded answer. Raises OSError or TimeoutError."""
