"""From HBM to DRAM: which chunks are saved when, and which saves somebody has to wait for.

A save does not hold the blocks it reads. Blocks of a running request are safe by themselves; once the request has let
them go, the step that hands them out anew waits for the save first, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvhearth.engine.block_pool import BlockPool
from kvhearth.engine.dram import DramTier
from kvhearth.engine.jobs import InFlight, Jobs
from kvhearth.engine.lazy import HbmChunk, LazyAdmission
from kvhearth.engine.ports import EngineConfig, Job, JobKind, Transfers
from kvhearth.engine.request import NEVER, RequestState


class Saves:
    """Saves of one engine, planned and in flight: at most for the chunks that DRAM has.

    Args:
        before_dram: called before DRAM is asked for room.
    """

    def __init__(
        self, config: EngineConfig, pool: BlockPool, dram: DramTier, jobs: Jobs, before_dram: Callable[[], None]
    ) -> None:
        self._dram = dram
        self._before_dram = before_dram
        self._jobs = jobs
        self._prompt_only = config.offload_prompt_only
        self._blocks_per_chunk = config.blocks_per_chunk
        self._chunk_tokens = config.block_size * config.blocks_per_chunk
        self._lazy = LazyAdmission(config, pool) if config.dram_admission == "lazy" else None
        self._unstarted: dict[int, Job] = {}
        self._fences: dict[int, list[int]] = {}
        self._flush: set[int] = set()

    @property
    def unstarted(self) -> bool:
        """The next step starts some."""
        return bool(self._unstarted)

    def first_due(self, prompt_tokens: int) -> int:
        """Computed tokens at which a new request's first chunk is due."""
        return NEVER if self._prompt_only and self._chunk_tokens > prompt_tokens else self._chunk_tokens

    def loaded(self, request: RequestState, end: int) -> None:
        """The chunks before ``end`` come from DRAM: no need to save them, unless HBM outlives DRAM."""
        request.saved_chunks = end if self._lazy is None else 0
        request.next_save = self._next_due(request)

    def start(self, transfers: Transfers) -> None:
        """A step begins: the KV of what was planned in the last one is there."""
        for job in self._unstarted.values():
            transfers.start(job)
        self._unstarted.clear()

    def preempted(self, request: RequestState) -> None:
        """The request lost its blocks in this step."""
        self._flush.update(request.saves)
        if self._lazy is not None:
            request.saved_chunks = 0
            request.next_save = self._next_due(request)

    def handed_out(self, blocks: Iterable[int]) -> None:
        """This step gave these blocks to requests, as new ones or as hits."""
        if self._fences:
            self._flush.update(job_id for block in blocks for job_id in self._fences.get(block, ()))

    def due(self, request: RequestState, computed: int) -> None:
        """Chunks of the request are whole with ``computed`` tokens (``next_save`` says so): save those that DRAM lacks.

        All or, without room for all, none, to be offered again. The job starts with the next step.
        """
        limit = min(computed, request.prompt) if self._prompt_only else computed
        first, end = request.saved_chunks, limit // self._chunk_tokens
        if self._lazy is not None:
            self._lazy.note(request, first, end)
        else:
            size = self._blocks_per_chunk
            keys = request.hashes[(first + 1) * size - 1 : end * size : size]
            new, used = self._lacking(keys)
            request.touched.update(first + index for index in used)
            if new and not self._dram.reserve([keys[index] for index in new], keys):
                return
            if new:
                blocks = [b for i in new for b in request.blocks[(first + i) * size : (first + i + 1) * size]]
                job = self._plan(tuple(keys[index] for index in new), request, blocks)
                request.saves.append(job.job_id)
        request.saved_chunks = end
        request.next_save = self._next_due(request)

    def over(self, request: RequestState) -> None:
        """The request has ended and lets its blocks go."""
        for job_id in request.saves:
            self._fence(job_id)

    def due_at_end(self, request: RequestState, handed_out: Sequence[int]) -> None:
        """As `due`, for a request that is over, whose blocks this step may have handed out."""
        if self._lazy is not None:
            return
        before = len(request.saves)
        self.due(request, request.computed)
        for job_id in request.saves[before:]:
            self._fence(job_id)
            if not set(self._jobs[job_id].blocks).isdisjoint(handed_out):
                self._flush.add(job_id)

    def pushed_out(self, handed_out: Sequence[int]) -> list[list[HbmChunk]]:
        """With lazy admission: chunks to `rescue` in this step."""
        return [] if self._lazy is None or not handed_out else self._lazy.pushed_out(set(handed_out))

    def next_in_line(self) -> list[list[HbmChunk]]:
        """With lazy admission: chunks to `rescue` without haste."""
        return [] if self._lazy is None else self._lazy.next_in_line()

    def rescue(self, chunks: Sequence[HbmChunk], now: bool) -> None:
        """Save chunks of one request (perhaps long gone), in chain order; ``now``: before this step computes."""
        keys = [chunk.key for chunk in chunks]
        new, used = self._lacking(keys)
        if new and self._dram.reserve([keys[index] for index in new], keys):
            blocks = [block for index in new for block in chunks[index].blocks]
            job = self._plan(tuple(keys[index] for index in new), chunks[0].request, blocks)
            self._fence(job.job_id)
            if now:
                self._flush.add(job.job_id)
        self._dram.touch(keys[index] for index in reversed(used))

    def wait(self, transfers: Transfers) -> int:
        """How long, in ns, the step waits for saves whose blocks it gave to others. Starts them first, if need be."""
        if not self._flush:
            return 0
        job_ids = sorted(self._flush)
        self._flush.clear()
        for job_id in job_ids:
            if job_id in self._unstarted:
                transfers.start(self._unstarted.pop(job_id))
        return transfers.flush(job_ids)

    def saved(self, job_id: int, job: InFlight) -> None:
        """A save is over."""
        self._dram.written(job.keys)
        if job_id in job.request.saves:
            job.request.saves.remove(job_id)
        for block in job.blocks if self._fences else ():
            waits_for = self._fences.get(block, [])
            if job_id in waits_for:
                waits_for.remove(job_id)
                if not waits_for:
                    del self._fences[block]

    def _lacking(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Indices of the keys that DRAM lacks, and of those that count as used: all but what is being written."""
        self._before_dram()
        new: list[int] = []
        used: list[int] = []
        for index, key in enumerate(keys):
            ready = self._dram.ready(key)
            if ready is None:
                new.append(index)
            if ready is not False:
                used.append(index)
        return new, used

    def _plan(self, keys: tuple[int, ...], request: RequestState, blocks: Sequence[int]) -> Job:
        job = self._jobs.register(JobKind.SAVE, keys, request, tuple(blocks))
        self._unstarted[job.job_id] = job
        return job

    def _fence(self, job_id: int) -> None:
        for block in self._jobs[job_id].blocks:
            self._fences.setdefault(block, []).append(job_id)

    def _next_due(self, request: RequestState) -> int:
        due = (request.saved_chunks + 1) * self._chunk_tokens
        return NEVER if self._prompt_only and due > request.prompt else due
