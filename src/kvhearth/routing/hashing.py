"""Names the content of a prompt by chained hashes, and estimates its tokens from its bytes. No tokenizer, no state.

The router hashes what clients send, the planner what its workload would send; both must use these two functions so that
a policy sees the same in real and in virtual time.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

DEFAULT_PIECE_BYTES = 256
"""Bytes of prompt text a hash covers: about four vLLM blocks of 16 tokens."""

DEFAULT_MAX_PIECES = 1024
"""Pieces hashed at most a prompt (256 KiB of text, about 65k tokens); what follows does not change where it goes."""

BYTES_PER_TOKEN = 4
"""Average for English text under current BPE vocabularies; only load balance depends on it."""


def prefix_hashes(
    text: bytes, piece_bytes: int = DEFAULT_PIECE_BYTES, seed: int = 0, max_pieces: int = DEFAULT_MAX_PIECES
) -> list[int]:
    """Hash every full piece of ``text``, each hash covering all text before it.

    Args:
        text: prompt content, in the order in which the engine sees it.
        piece_bytes: bytes a piece; a last partial piece is left out.
        seed: start of the chain, below 2**64; see `content_seed`.
        max_pieces: bound on the result's length.

    Returns:
        At most ``max_pieces`` integers below 2**64. Two lists agree in their first n entries exactly when seed and the
        first ``n * piece_bytes`` bytes agree (up to collisions of xxh3_64).
    """
    hashes = []
    chained = seed
    end = min(len(text) // piece_bytes, max_pieces) * piece_bytes
    for start in range(0, end, piece_bytes):
        chained = xxh3_64_intdigest(text[start : start + piece_bytes], chained)
        hashes.append(chained)
    return hashes


def content_seed(model: str, salt: str = "") -> int:
    """Seed that keeps models (LoRA adapters too) and ``cache_salt`` groups apart: they never share KV."""
    return xxh3_64_intdigest(f"{len(model)}:{model}{salt}".encode("utf-8", "surrogatepass"))


def estimate_tokens(nbytes: int) -> int:
    """Tokens of a prompt of ``nbytes`` bytes: ``max(1, nbytes // 4)``."""
    return max(1, nbytes // BYTES_PER_TOKEN)
