"""The fingerprint of everything that makes KV bytes interchangeable, and the store keys that begin with it.

Two engines share a chunk only when every field here is equal. A field too many costs a hit; one too few costs
correctness, so when in doubt a fact belongs in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class Namespace:
    """Named facts about an engine's KV, all strings; see `kvhearth.connector.fingerprint` for what they are."""

    fields: Mapping[str, str]

    def digest(self, lora: str = "") -> str:
        """32 hex digits of the fields and of a LoRA adapter's digest (empty: the base model)."""
        text = json.dumps([sorted(self.fields.items()), lora], separators=(",", ":"), ensure_ascii=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def key_prefix(self, lora: str = "") -> bytes:
        """What every store key of a request begins with; vLLM's OffloadKey (block hash and KV group) follows."""
        return f"{self.digest(lora)}:".encode()

    def with_epoch(self, epoch: str) -> Namespace:
        """The same engine with other weights in it."""
        return Namespace({**self.fields, "epoch": epoch})

    @property
    def epoch_number(self) -> int:
        """u64 of the weights epoch, for headers."""
        return xxhash.xxh3_64_intdigest(self.fields.get("epoch", "").encode())

    def differences(self, other: Namespace) -> list[str]:
        """Names of the fields that differ, in order."""
        names = sorted({*self.fields, *other.fields})
        return [name for name in names if self.fields.get(name) != other.fields.get(name)]

    def to_json(self) -> str:
        """For the store's register."""
        return json.dumps(dict(self.fields), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """Read what `to_json` wrote. Raises ValueError for anything else."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or not all(isinstance(v, str) for v in fields.values()):
            raise ValueError("a namespace is an object of strings")
        return cls(fields)


def group_number(cache_salt: str | None) -> int:
    """u32 that names the sharing group of a ``cache_salt`` in headers; 0: no salt. The salt itself stays here."""
    if not cache_salt:
        return 0
    return (xxhash.xxh3_64_intdigest(cache_salt.encode()) & 0xFFFF_FFFF) or 1
