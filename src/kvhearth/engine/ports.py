"""The engine model's border: what goes in, what a step reports, and the port through which KV moves.

Nothing here has behaviour. Token ids never cross this border: a request names the content of its blocks by chained
hashes, so that equal hashes mean equal KV. Times are integer nanoseconds; keys and hashes are non-negative integers
below 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, Protocol

DramAdmission = Literal["eager", "lazy"]


class OffloadMode(Enum):
    """Where KV may go when it leaves HBM."""

    NONE = "none"
    NATIVE = "native"
    """The engine's own DRAM."""
    SHARED = "shared"
    """The engine's own DRAM and behind it the store that all engines share."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Shape and limits of one engine; names follow vLLM's flags.

    Args:
        num_blocks: usable KV blocks in HBM (vLLM's ``num_gpu_blocks`` less its null block).
        block_size: tokens a block.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: token budget of a step.
        max_model_len: longest prompt plus output in tokens.
        long_prefill_token_threshold: cap on one request's prefill tokens a step; 0 = none.
        enable_chunked_prefill: let a prompt be computed over several steps.
        watermark: fraction of the blocks kept free when a request is admitted beside running ones (vLLM's default: 0).
        enable_prefix_caching: keep full blocks for reuse by hash.
        mode: where KV may go.
        blocks_per_chunk: blocks moved and stored as one unit.
        dram_chunks: capacity of the engine's DRAM tier, in chunks (modes native and shared).
        chunk_bytes: bytes of one chunk's KV, for the transfer jobs.
        offload_prompt_only: only chunks of the prompt leave HBM (vLLM's default).
        dram_admission: whether chunks are saved as soon as they are computed (vLLM's way), or only when their blocks
            are about to be used for something else.
    """

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 131_072
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    mode: OffloadMode = OffloadMode.NONE
    blocks_per_chunk: int = 1
    dram_chunks: int = 0
    chunk_bytes: int = 0
    offload_prompt_only: bool = True
    dram_admission: DramAdmission = "eager"


class EngineRequest(NamedTuple):
    """One request as the engine sees it.

    ``block_hashes`` names every full block of prompt *and* output, ``(prompt_tokens + output_tokens) // block_size``
    of them, each hash covering all tokens before it (so equal hash = equal prefix). Output content is thus fixed on
    submission; its blocks become visible to the prefix cache only as they are computed.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[int]


class JobKind(Enum):
    """The four ways KV moves. The engine chains them: fetch then load, save then put."""

    LOAD = "load"
    """Engine DRAM → HBM."""
    SAVE = "save"
    """HBM → engine DRAM."""
    FETCH = "fetch"
    """Store → engine DRAM (a `get`)."""
    PUT = "put"
    """Engine DRAM → store."""


class Job(NamedTuple):
    """A transfer of whole chunks, in chain order. ``keys`` are the chunk hashes; ``nbytes`` is real, unscaled KV."""

    job_id: int
    kind: JobKind
    keys: tuple[int, ...]
    nbytes: int


class JobDone(NamedTuple):
    """A finished job. ``keys_ok``: how many leading keys arrived; fewer than asked is a failure of the rest.

    Only what the store does can fail: as in vLLM, loads and saves stay inside the engine and arrive whole.
    """

    job_id: int
    keys_ok: int


class Transfers(Protocol):
    """How the engine learns what the store has and when its transfers are done. All calls return at once."""

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        """How many leading ``keys`` the store holds; None = not known yet, the engine asks again in its next step.

        A request may have lookups of different keys open. An answer is final until `forget`.
        """

    def start(self, job: Job) -> None:
        """Begin a transfer. The engine bounds what it has in flight."""

    def flush(self, job_ids: Sequence[int]) -> int:
        """The step computes only when these saves, all started, are over: how long that takes from now, in ns.

        Loads that start after it in the same step begin only then, too.
        """

    def finished(self) -> Sequence[JobDone]:
        """Jobs completed since the last call, in order of completion. Each job is reported once."""

    def forget(self, request_id: str) -> None:
        """The request needs no answers any more, or asks afresh: drop its lookups."""


class NoTransfers:
    """The port of an engine in mode none: nothing to find, nothing to move."""

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        return 0

    def start(self, job: Job) -> None:
        raise RuntimeError(f"transfer {job} in mode none")

    def flush(self, job_ids: Sequence[int]) -> int:
        raise RuntimeError(f"transfers {job_ids} in mode none")

    def finished(self) -> Sequence[JobDone]:
        return ()

    def forget(self, request_id: str) -> None:
        return None


class StepCost(Protocol):
    """The part of the cost model that a step needs."""

    def step_ns(self, prefills: Sequence[tuple[int, int]], n_decode: int, sum_context: int) -> int:
        """Duration of a mixed step in ns. ``prefills``: (new tokens, tokens before them) a request; ``n_decode``
        requests generate one token each over ``sum_context`` tokens of context in total."""


class KvTier(Enum):
    """Where an engine has KV, or has put it."""

    HBM = "hbm"
    DRAM = "dram"
    STORE = "store"


class KvEvent(NamedTuple):
    """Something entered a tier or left it, in the engine's own keys.

    Attributes:
        tier: where. Keys of HBM are block hashes, the others' chunk keys.
        stored: True = it can be found there from now on; False = it is gone.
        keys: which; none and not stored: everything, the tier was emptied. As in vLLM, HBM may hold several copies of a
            block, each of them stored and removed for itself.
        request_id: HBM, stored: whose blocks they are, consecutive ones from its ``first`` on, counted from 0.
    """

    tier: KvTier
    stored: bool
    keys: tuple[int, ...]
    request_id: str = ""
    first: int = 0


class Sources(NamedTuple):
    """Prompt tokens by where their KV came from, when the request first got past its prompt; sums to the prompt."""

    hbm: int = 0
    dram: int = 0
    store: int = 0
    compute: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; plain integers, read by whoever shows them.

    ``reprefill_tokens`` are tokens computed again that a request had lost to a preemption; with them, the tokens
    scheduled add up: computed prompt tokens + generated tokens but for each last one + these. ``reprefills_avoided``
    counts admissions and resumptions whose otherwise-computed tokens came from DRAM or the store,
    ``reprefill_avoided_tokens`` those tokens. ``external_prefix_cache_hits_store`` are those of
    ``external_prefix_cache_hits`` that came from the store.
    """

    requests_finished: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prompt_tokens_hbm: int = 0
    prompt_tokens_dram: int = 0
    prompt_tokens_store: int = 0
    prompt_tokens_compute: int = 0
    reprefill_tokens: int = 0
    reprefills_avoided: int = 0
    reprefill_avoided_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    external_prefix_cache_hits_store: int = 0
    load_bytes: int = 0
    save_bytes: int = 0
    fetch_bytes: int = 0
    put_bytes: int = 0
    failed_loads: int = 0
    steps: int = 0


class Finished(NamedTuple):
    """A request that ended in this step. ``sources`` sums to ``prompt_tokens``."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    sources: Sources
    preemptions: int
    reprefill_tokens: int


@dataclass(slots=True)
class Step:
    """What one call of `EngineModel.step` did. Its tokens exist ``duration_ns`` after the step began; the next step may
    begin then.

    Attributes:
        scheduled: request id → tokens scheduled, in scheduling order (vLLM's ``num_scheduled_tokens``).
        sampled: ids of the requests that produced one output token at the end of this step, in order.
        finished: requests whose last token that was.
        preempted: ids preempted while scheduling, in order.
        duration_ns: modelled duration, what it waits for saves included (which may be all that it does).
        waiting_on_transfers: True when nothing was scheduled though requests wait for a lookup or a load: call again
            when the port has news.
        kv_events: what entered and left the tiers since the last step, each tier's in order; none unless the model was
            made to tell.
    """

    scheduled: dict[str, int] = field(default_factory=dict)
    sampled: list[str] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    duration_ns: int = 0
    waiting_on_transfers: bool = False
    kv_events: list[KvEvent] = field(default_factory=list)
