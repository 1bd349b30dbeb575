"""What the tier must know of a request and vLLM's tier interface does not say: whose it is, how its chunks chain."""

from __future__ import annotations

import logging
import os
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvhearth.connector.lookups import Promise
from kvhearth.connector.weights import digest_directory

_LONGEST_AWAIT_SECONDS = 60.0
_MOST_TOKENS = 1 << 31
_ADAPTER_FILES = ("adapter_model.*", "adapter_config.json")
_MOST_ADAPTERS = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestFacts:
    """Of one request, kept with vLLM's ``ReqContext``.

    Attributes:
        req_id: vLLM's.
        epoch_serial: the tier's count of weights epochs when the request came; later ones share nothing with it.
        key_prefix: begins its store keys.
        group: sharing group (u32).
        wishes: what its ``kv_transfer_params`` ask for.
        chains: for each KV group its chunks' keys in order; vLLM's own lists, which grow as the request does.
        chunk_tokens: tokens a chunk, for each KV group.
        chained: for each KV group whether a chunk is of use only with all those before it (full attention).
        promoted: how often each chunk was promised to vLLM as being in the store.
    """

    req_id: str
    epoch_serial: int
    key_prefix: bytes
    group: int
    wishes: Wishes
    chains: Sequence[Sequence[bytes]]
    chunk_tokens: Sequence[int]
    chained: Sequence[bool]
    promoted: dict[bytes, int] = field(default_factory=dict)

    def parent_of(self, kv_group: int, position: int) -> bytes | None:
        """The store's name of the chunk before the one at ``position`` (from 0); None: it needs none."""
        if position <= 0 or not self.chained[kv_group]:
            return None
        chain = self.chains[kv_group]
        return self.key_prefix + chain[position - 1] if position - 1 < len(chain) else None


@dataclass(frozen=True, slots=True)
class Wishes:
    """``kv_transfer_params["kvhearth"]`` of a request: pin its chunks in the store; await what prefill promised."""

    pin: bool = False
    promise: Promise | None = None


def read_wishes(params: Mapping[str, Any] | None) -> Wishes:
    """Read them; what makes no sense is ignored with a warning, as vLLM does with its own keys there."""
    asked = params.get("kvhearth") if isinstance(params, Mapping) else None
    if asked is None:
        return Wishes()
    given: Mapping[str, Any] = asked if isinstance(asked, Mapping) else {"pin": None}
    pin: Any = given.get("pin", False)
    tokens: Any = given.get("await_tokens", 0)
    seconds: Any = given.get("await_seconds", 0)
    right = (
        isinstance(pin, bool)
        and type(tokens) is int
        and 0 <= tokens <= _MOST_TOKENS
        and type(seconds) in (int, float)
        and 0 <= seconds <= _LONGEST_AWAIT_SECONDS
    )
    if not right:
        _log.warning(
            "kv_transfer_params.kvhearth: want pin (true or false), await_tokens (a count) and await_seconds (at most "
            "%g), not %.200s; ignored",
            _LONGEST_AWAIT_SECONDS,
            reprlib.repr(asked),
        )
        return Wishes()
    promise = Promise(tokens, time.monotonic() + seconds) if tokens and seconds else None
    return Wishes(pin, promise)


_Signature = tuple[tuple[str, int, int, int], ...]


class LoraDigests:
    """Digests of adapters' files. vLLM hashes only an adapter's name and path, so a retrained adapter at the same path
    would find the old one's KV in a store that outlives the engine.

    An adapter whose files change while the engine runs shares nothing from then on: which of the two the engine has in
    memory cannot be told, and its HBM and DRAM may still hold KV of the old one under the same hashes.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Signature, str | None]] = {}

    def of(self, lora_request: Any) -> str | None:
        """The digest of a request's adapter; "" for the base model; None when it cannot be told (share nothing)."""
        if lora_request is None:
            return ""
        try:
            path = Path(lora_request.lora_path)
            key, signature = str(path), self._signature(path)
            known = self._known.get(key)
            if known is None and len(self._known) >= _MOST_ADAPTERS:
                return None
            if known is None:
                weights = any(name.startswith("adapter_model.") for name, *_ in signature)
                known = (signature, digest_directory(path, _ADAPTER_FILES) if weights else None)
            elif known[0] != signature:
                known = (known[0], None)
            self._known[key] = known
            return known[1]
        except (OSError, AttributeError) as error:
            _log.warning("cannot read the adapter of a request, so it shares nothing: %s", error)
            return None

    def forget(self) -> None:
        """The engine's cache was reset: what is loaded now is all that it holds KV of."""
        self._known.clear()

    @staticmethod
    def _signature(path: Path) -> _Signature:
        found = []
        for pattern in _ADAPTER_FILES:
            for file in sorted(path.glob(pattern)):
                status = os.stat(file)
                found.append((file.name, status.st_size, status.st_mtime_ns, status.st_ino))
        return tuple(found)
