"""Block hashes byte for byte as vLLM 0.32 makes them, without vLLM: equal for the same tokens, algorithm and seed.

Follows ``hash_block_tokens`` and ``generate_block_hash_extra_keys`` (``vllm/v1/core/kv_cache_utils.py``) and
``vllm/utils/hashing.py``. Emulated prompts have neither images nor embeddings, so a block depends on tokens, adapter
and salt alone.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cbor2
import xxhash

from kvhearth.errors import UserError

DEFAULT_ALGORITHM = "sha256"
DEFAULT_SEED = "vllm-none-hash"
"""What sha256 and sha256_cbor start from unless ``PYTHONHASHSEED`` is set; the xxhash family starts at random."""

_MASK_64 = (1 << 64) - 1


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    encoded: bytes = cbor2.dumps(value, canonical=True)
    return encoded


ALGORITHMS: dict[str, Callable[[object], bytes]] = {
    "sha256": lambda value: hashlib.sha256(_pickled(value)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(_cbor(value)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}
"""By their names in vLLM's ``--prefix-caching-hash-algo``."""


class Adapter(NamedTuple):
    """A LoRA adapter: what clients call it, where it is, and its number, from 1."""

    name: str
    path: str
    number: int


class VllmHasher:
    """Hashes of one engine.

    Args:
        algorithm: one of `ALGORITHMS`.
        seed: ``PYTHONHASHSEED`` of the engine that is emulated; None = it is not set.

    Raises:
        UserError: the algorithm is unknown.
    """

    def __init__(self, algorithm: str = DEFAULT_ALGORITHM, seed: str | None = None) -> None:
        if algorithm not in ALGORITHMS:
            raise UserError(
                f"{algorithm!r} is unknown",
                where="prefix_caching_hash_algo",
                remedy=f"choose {', '.join(ALGORITHMS)}",
            )
        self._hash = ALGORITHMS[algorithm]
        if seed is None:
            seed = os.urandom(32).hex() if algorithm.startswith("xxhash") else DEFAULT_SEED
        self._root = self._hash(seed)

    def digests(
        self, token_ids: Sequence[int], block_size: int, salt: str = "", adapter: Adapter | None = None
    ) -> list[bytes]:
        """Hashes of the full blocks.

        Args:
            token_ids: n ids.
            block_size: tokens a block.
            salt: the request's ``cache_salt``; it enters the first block's hash, and through it all others.
            adapter: the request's LoRA; it enters every block's hash.

        Returns:
            ``n // block_size`` digests.
        """
        hash_of = self._hash
        parent = self._root
        lora: tuple[Any, ...] = () if adapter is None else (("lora", adapter.name, adapter.path),)
        extra = (*lora, ("cache_salt", salt)) if salt else lora or None
        digests = []
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            parent = hash_of((parent, tuple(token_ids[start : start + block_size]), extra))
            digests.append(parent)
            extra = lora or None
        return digests

    def hashes(
        self, token_ids: Sequence[int], block_size: int, salt: str = "", adapter: Adapter | None = None
    ) -> list[int]:
        """`digests` as vLLM's KV events show them: the last 64 bits."""
        return [external(digest) for digest in self.digests(token_ids, block_size, salt, adapter)]


def external(digest: bytes) -> int:
    """A block hash as KV events show it (``maybe_convert_block_hash``)."""
    return int.from_bytes(digest, "big") & _MASK_64
