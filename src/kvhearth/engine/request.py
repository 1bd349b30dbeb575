"""State of one request inside the engine. No rules: the scheduler and the offloader change it."""

from __future__ import annotations

from kvhearth.engine.accounting import Hit, Range, merge
from kvhearth.engine.ports import EngineRequest, Sources

NEVER = 1 << 62


class RequestState:
    """One request from submission to its end. All counts are in tokens unless the name says otherwise.

    Attributes:
        tokens: prompt plus generated so far; ``total`` when it is finished.
        computed: leading tokens whose KV is in HBM (or will be, once ``load`` is done).
        blocks: its blocks in HBM, in order.
        published: leading blocks that the prefix cache knows.
        begun_at: where this admission began to compute.
        local: what this admission found in HBM. ``hits``: all it found, by source.
        recomputable: what earlier admissions had and lost, for telling repeated work.
        over: finished or aborted.
        load: job of its load in flight, else None. ``loaded``: it is done, and the scheduler has not taken it yet.
        saved_chunks: leading chunks offered to DRAM so far. ``next_save``: computed tokens at which the next one is.
        saves: jobs of its saves in flight.
        touched: indices of the chunks it used in DRAM.
        known: what the store said of chunks, None where it has not answered. ``asking``: chunks to ask for at the end
            of this step, ``batches``: what was asked and is not answered.
        promoted: times each chunk was to be fetched for it. ``fetched``: those of which it did not fail.
    """

    __slots__ = (
        "asking",
        "batches",
        "begun_at",
        "blocks",
        "computed",
        "fetched",
        "hashes",
        "hits",
        "known",
        "load",
        "loaded",
        "local",
        "next_save",
        "over",
        "preemptions",
        "promoted",
        "prompt",
        "published",
        "recomputable",
        "reprefill",
        "request_id",
        "saved_chunks",
        "saves",
        "sources",
        "tokens",
        "total",
        "touched",
    )

    def __init__(self, request: EngineRequest, next_save: int) -> None:
        self.request_id = request.request_id
        self.prompt = request.prompt_tokens
        self.total = request.prompt_tokens + request.output_tokens
        self.hashes = tuple(request.block_hashes)
        self.tokens = request.prompt_tokens
        self.computed = 0
        self.blocks: list[int] = []
        self.published = 0
        self.begun_at = 0
        self.local = 0
        self.hits: list[Hit] = []
        self.recomputable: list[Range] = []
        self.reprefill = 0
        self.preemptions = 0
        self.sources: Sources | None = None
        self.over = False
        self.load: int | None = None
        self.loaded = False
        self.saved_chunks = 0
        self.next_save = next_save
        self.saves: list[int] = []
        self.touched: set[int] = set()
        self.known: dict[int, bool | None] = {}
        self.asking: list[int] = []
        self.batches: list[tuple[int, ...]] = []
        self.promoted: dict[int, int] = {}
        self.fetched: set[int] = set()

    def preempt(self) -> None:
        """Back to nothing computed; what would be repeated work from now on is remembered.

        That is what it had computed; once its prompt is accounted for, all KV that it had.
        """
        lost_from = self.begun_at if self.sources is None else 0
        if self.computed > lost_from:
            self.recomputable = merge(self.recomputable, lost_from, self.computed)
        self.computed = 0
        self.blocks = []
        self.published = 0
        self.hits = []
        self.preemptions += 1
