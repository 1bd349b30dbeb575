"""A scripted `Transfers` port and a way to make requests, for the tests of this room."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvhearth.engine import EngineModel, EngineRequest, Finished, Job, JobDone, JobKind


class ScriptedTransfers:
    """A store in memory, and transfers that take a number of steps; engines given the same store share it.

    Args:
        store: chunk hashes the store holds; puts add to it.
        delay: steps a job takes; 0 = done in the next step.
        ok: how many of a fetch's or put's keys arrive (default: all that exist).
        lookup_delay: times a lookup answers None first.
        flush_ns: what waiting for saves takes.
    """

    def __init__(
        self,
        store: set[int] | None = None,
        delay: Callable[[Job], int] = lambda job: 0,
        ok: Callable[[Job], int] = lambda job: len(job.keys),
        lookup_delay: int = 0,
        flush_ns: int = 0,
    ) -> None:
        self.store: set[int] = set() if store is None else store
        self.jobs: list[Job] = []
        self.in_flight: dict[int, tuple[int, Job]] = {}
        self.lookups: dict[str, dict[tuple[int, ...], int]] = {}
        self.flushed: list[int] = []
        self.questions = 0
        self.most_in_flight = 0
        self._delay, self._ok, self._lookup_delay, self._flush_ns = delay, ok, lookup_delay, flush_ns

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        lookups = self.lookups.setdefault(request_id, {})
        times = lookups.get(tuple(keys), 0)
        lookups[tuple(keys)] = times + 1
        self.questions += times == 0
        if times < self._lookup_delay:
            return None
        return self._held(keys)

    def start(self, job: Job) -> None:
        assert job.keys
        assert job.job_id not in self.in_flight
        self.jobs.append(job)
        self.in_flight[job.job_id] = (self._delay(job), job)
        self.most_in_flight = max(self.most_in_flight, sum(len(job.keys) for _, job in self.in_flight.values()))

    def flush(self, job_ids: Sequence[int]) -> int:
        for job_id in job_ids:
            _, job = self.in_flight[job_id]
            assert job.kind is JobKind.SAVE
            self.in_flight[job_id] = (0, job)
        self.flushed += job_ids
        return self._flush_ns

    def finished(self) -> Sequence[JobDone]:
        done = [job for left, job in self.in_flight.values() if left <= 0]
        self.in_flight = {i: (left - 1, job) for i, (left, job) in self.in_flight.items() if left > 0}
        return [JobDone(job.job_id, self._finish(job)) for job in done]

    def forget(self, request_id: str) -> None:
        del self.lookups[request_id]

    def of(self, kind: JobKind) -> list[Job]:
        return [job for job in self.jobs if job.kind is kind]

    def _held(self, keys: Sequence[int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.store), len(keys))

    def _finish(self, job: Job) -> int:
        ok = self._ok(job) if job.kind in (JobKind.FETCH, JobKind.PUT) else len(job.keys)
        if job.kind is JobKind.FETCH:
            ok = min(ok, self._held(job.keys))
        if job.kind is JobKind.PUT:
            self.store.update(job.keys[:ok])
        return ok


class Prompts:
    """Makes requests whose block hashes are chained over made-up content: equal words, equal prefix."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._count = 0

    def request(self, words: Sequence[object], prompt_tokens: int, output_tokens: int) -> EngineRequest:
        """The prompt's blocks take their content from ``words``, one a block; what is beyond is the request's own."""
        self._count += 1
        request_id = f"r{self._count}"
        hashes: list[int] = []
        parent = 0
        for i in range((prompt_tokens + output_tokens) // self.block_size):
            word = words[i] if i < len(words) and (i + 1) * self.block_size <= prompt_tokens else (request_id, i)
            parent = random.Random(f"{parent} {word}").getrandbits(63)
            hashes.append(parent)
        return EngineRequest(request_id, prompt_tokens, output_tokens, tuple(hashes))


def run_to_end(engine: EngineModel, transfers: ScriptedTransfers, limit: int = 20_000) -> list[Finished]:
    """Steps until nothing is left to do; checks the engine's integrity on the way."""
    finished: list[Finished] = []
    for _ in range(limit):
        if not engine.has_work:
            return finished
        finished += engine.step(transfers).finished
        engine.check_integrity()
    raise AssertionError(f"still busy after {limit} steps: {engine.num_running} running, {engine.num_waiting} waiting")


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedTransfers]:
    return ScriptedTransfers


@pytest.fixture(scope="session")
def prompts() -> type[Prompts]:
    return Prompts


@pytest.fixture(scope="session")
def finish() -> Callable[..., list[Finished]]:
    return run_to_end
