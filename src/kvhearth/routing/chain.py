"""Names the KV of a prompt by chained keys over its token ids, block by block: equal key = equal tokens up to
there, under the same LoRA and salt. These are our keys, not vLLM's hashes, which depend on each engine's algorithm.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

KEY_MASK = (1 << 60) - 1
"""Keys are below 2**60 and never 0: CPython keeps them in 32 bytes, and 0 can mean none."""

MAX_BLOCKS = 65_536
"""Keys at most for one call: a million tokens in blocks of 16."""


def chain_seed(lora: str = "", salt: str = "") -> int:
    """Where the chain of a LoRA adapter ("" = the base model) and a ``cache_salt`` begins; no two pairs share one."""
    return (xxh3_64_intdigest(f"{len(lora)}:{lora}{salt}".encode("utf-8", "surrogatepass")) & KEY_MASK) or 1


def block_keys(
    token_ids: Sequence[int],
    block_tokens: int,
    seed: int,
    extra: Sequence[object] | None = None,
    max_blocks: int = MAX_BLOCKS,
) -> list[int]:
    """Key of every full block, each covering all tokens before it.

    Args:
        token_ids: tokens, each in [0, 2**32).
        block_tokens: tokens a block, at least 1; a last partial block is left out.
        seed: `chain_seed`, or the key of the block before the first.
        extra: for each block what else its KV depends on (see `split_extra_keys`), None = nothing.
        max_blocks: bound on the result's length.

    Returns:
        At most ``max_blocks`` integers in [1, 2**60).

    Raises:
        ValueError: a token id is no integer in [0, 2**32), or an extra key has no form of its own.
    """
    count = min(len(token_ids) // block_tokens, max_blocks)
    try:
        words = array("I", token_ids if count * block_tokens == len(token_ids) else token_ids[: count * block_tokens])
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error
    if sys.byteorder != "little":
        words.byteswap()
    data = words.tobytes()
    step = 4 * block_tokens
    keys = []
    key = seed
    if extra is None:
        for start in range(0, count * step, step):
            key = (xxh3_64_intdigest(data[start : start + step], key) & KEY_MASK) or 1
            keys.append(key)
        return keys
    for start, more in zip(range(0, count * step, step), extra, strict=False):
        piece = data[start : start + step]
        if more is not None:
            piece += _packed(more)
        key = (xxh3_64_intdigest(piece, key) & KEY_MASK) or 1
        keys.append(key)
    return keys


def _packed(extra: object) -> bytes:
    try:
        return json.dumps(extra, default=_jsonable, sort_keys=True).encode()
    except (TypeError, RecursionError) as error:  # names of several types, or lists without end
        raise ValueError(f"extra keys without a form of their own: {error}") from error


def _jsonable(value: object) -> object:
    return {"bytes": value.hex()} if isinstance(value, bytes) else {"repr": repr(value)}


def split_extra_keys(
    extra_keys: Sequence[Sequence[object] | None] | None, lora: str = ""
) -> tuple[str, list[object] | None]:
    """What a ``BlockStored`` event's ``extra_keys`` say, taken apart.

    vLLM lists for each block, untagged and in this order: the LoRA's name, ``(identifier, offset)`` of multi-modal
    inputs, the ``cache_salt`` (first block of a prompt only), digests of prompt embeddings as bytes
    (``generate_block_hash_extra_keys`` and ``to_event_extra_keys`` in vLLM's ``v1/core/kv_cache_utils.py``).

    Returns:
        The salt ("" = none) and, for each block, the keys that are neither LoRA nor salt, or None; None when no block
        has any.
    """
    salt = ""
    rest: list[object] = []
    for at, keys in enumerate(extra_keys or ()):
        others = list(keys or ())
        if lora and others and others[0] == lora:
            del others[0]
        if at == 0:
            salt = next((key for key in others if isinstance(key, str)), "")
        others = [key for key in others if not isinstance(key, str)]
        rest.append(others or None)
    return salt, (rest if any(rest) else None)
