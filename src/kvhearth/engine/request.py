"""State of one request inside the engine. No rules: the scheduler and the offloader change it."""

from __future__ import annotations

from kvhearth.engine.accounting import Hit, Range, merge
from kvhearth.engine.ports import EngineRequest, Sources

NEVER = 1 << 62
UNKNOWN = -1


class RequestState:
    """One request from submission to its end. All counts are in tokens unless the name says otherwise.

    Attributes:
        tokens: prompt plus generated so far; ``total`` when it is finished.
        computed: leading tokens whose KV is in HBM (or will be, once ``load`` is done).
        blocks: its blocks in HBM, in order.
        published: leading blocks that the prefix cache knows.
        begun_at: where this admission began to compute.
        hits: what this admission found, by source.
        recomputable: what earlier admissions had and lost, for telling repeated work.
        load: job of its load in flight, else None. ``loaded_chunks``: its result, until the scheduler takes it.
        saved_chunks: leading chunks offered to DRAM so far. ``next_save``: computed tokens at which the next one is.
        saves: saves in flight that read its blocks. ``released``: they outlived its hold on those blocks.
    """

    __slots__ = (
        "aborted",
        "asked",
        "begun_at",
        "blocks",
        "compute_rest",
        "computed",
        "fetch",
        "fetched",
        "fetches",
        "hashes",
        "hits",
        "load",
        "load_first",
        "loaded_chunks",
        "local",
        "next_save",
        "preemptions",
        "prompt",
        "published",
        "recomputable",
        "released",
        "reprefill",
        "request_id",
        "saved_chunks",
        "saves",
        "sources",
        "store_end",
        "tokens",
        "total",
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
        self.aborted = False
        self.load: int | None = None
        self.load_first = 0
        self.loaded_chunks: int | None = None
        self.saved_chunks = 0
        self.next_save = next_save
        self.saves = 0
        self.released = False
        self.start_over()

    def start_over(self) -> None:
        """Forget what the last admission learned of DRAM and the store."""
        self.asked: tuple[int, tuple[int, ...]] | None = None
        self.store_end = UNKNOWN
        self.fetch: int | None = None
        self.fetched: set[int] = set()
        self.fetches = 0
        self.compute_rest = False

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
        self.start_over()
