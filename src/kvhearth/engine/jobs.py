"""The transfers of one engine that are under way, by their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvhearth.engine.ports import Job, JobKind
from kvhearth.engine.request import RequestState


class InFlight(NamedTuple):
    """A job and what it touches: the chunks, and of a save the blocks that it reads."""

    kind: JobKind
    keys: tuple[int, ...]
    request: RequestState
    blocks: tuple[int, ...]


class Jobs:
    """Numbers jobs and remembers them until they are over."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._jobs: dict[int, InFlight] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._jobs.values())

    def __getitem__(self, job_id: int) -> InFlight:
        return self._jobs[job_id]

    def register(
        self, kind: JobKind, keys: tuple[int, ...], request: RequestState, blocks: tuple[int, ...] = ()
    ) -> Job:
        """A new job, for the port to start."""
        job = Job(self._next_id, kind, keys, len(keys) * self._chunk_bytes)
        self._next_id += 1
        self._jobs[job.job_id] = InFlight(kind, keys, request, blocks)
        return job

    def over(self, job_id: int) -> InFlight:
        """Forget a job that is over."""
        return self._jobs.pop(job_id)
