"""What a conformance workload prescribes of transfers: how many steps each takes, what fails, what the store holds.

Both sides run the same script: kvhearth's engine model through `ScriptedPort`, vLLM's Scheduler through `oracle_tiers`.
A job that starts in step n and takes k steps is known to be over at the beginning of step n + 1 + k.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from kvhearth.engine import Job, JobDone, JobKind


class Script(NamedTuple):
    """Prescriptions, each used in turn, over and over.

    Attributes:
        moves: steps that the n-th transfer between HBM and DRAM takes.
        ranks: of those that end together, the one of the lowest rank is first.
        fetches: steps and failures of the n-th fetch: how many of its chunks come (None: all).
        puts: steps of the n-th put. ``lookups``: steps until the n-th lookup is answered.
        stored: of each arrival's prompt, in turn, how many leading chunks the store has from the beginning.
        evictions: step → the store loses the keys that have this remainder modulo 3.
    """

    moves: tuple[int, ...]
    ranks: tuple[int, ...]
    fetches: tuple[tuple[int, int | None], ...]
    puts: tuple[int, ...]
    lookups: tuple[int, ...]
    stored: tuple[int, ...]
    evictions: dict[int, int]


class Started(NamedTuple):
    """A transfer as both sides name it: chunks by our hashes, in chain order."""

    kind: JobKind
    keys: tuple[int, ...]


class ScriptedMoves:
    """Transfers between HBM and DRAM: when each is over."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._count = 0
        self._under_way: dict[int, tuple[int, int, int]] = {}

    def start(self, job_id: int, step: int) -> None:
        script, n = self._script, self._count
        self._count += 1
        due = step + 1 + script.moves[n % len(script.moves)]
        self._under_way[job_id] = (due, script.ranks[n % len(script.ranks)], n)

    def flush(self, job_id: int, step: int) -> None:
        """Somebody waits for it in this step."""
        _, rank, n = self._under_way[job_id]
        self._under_way[job_id] = (step + 1, rank, n)

    def take_over(self, step: int) -> list[int]:
        """Jobs over at the beginning of ``step``, in order."""
        over = sorted((order, job_id) for job_id, order in self._under_way.items() if order[0] <= step)
        for _, job_id in over:
            del self._under_way[job_id]
        return [job_id for _, job_id in over]


class ScriptedStore:
    """The store and its jobs."""

    def __init__(self, script: Script, keys: set[int]) -> None:
        self._script = script
        self._held = set(keys)
        self._counts: Counter[JobKind] = Counter()
        self._lookups = 0
        self._under_way: list[tuple[int, int, Job, int | None]] = []
        self._over: list[JobDone] = []

    def begin_step(self, step: int) -> None:
        if step in self._script.evictions:
            self._held = {key for key in self._held if key % 3 != self._script.evictions[step]}
        over = sorted(entry[:2] for entry in self._under_way if entry[0] <= step)
        jobs = {entry[1]: entry for entry in self._under_way}
        self._under_way = [entry for entry in self._under_way if entry[0] > step]
        for _, order in over:
            _, _, job, comes = jobs[order]
            keys_ok = len(job.keys)
            if job.kind is JobKind.PUT:
                self._held.update(job.keys)
            else:
                keys_ok = min(self.leading(job.keys), keys_ok if comes is None else comes)
            self._over.append(JobDone(job.job_id, keys_ok))

    def start(self, job: Job, step: int) -> None:
        n = self._counts[job.kind]
        self._counts[job.kind] += 1
        takes, comes = self._script.puts[n % len(self._script.puts)], None
        if job.kind is JobKind.FETCH:
            takes, comes = self._script.fetches[n % len(self._script.fetches)]
        self._under_way.append((step + 1 + takes, sum(self._counts.values()), job, comes))

    def ask(self, step: int) -> int:
        """The step from which on a lookup that is sent now is answered."""
        n = self._lookups
        self._lookups += 1
        return step + 1 + self._script.lookups[n % len(self._script.lookups)]

    def leading(self, keys: Sequence[int]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._held), len(keys))

    def take_over(self) -> list[JobDone]:
        """Jobs that are over and were not taken before."""
        over, self._over = self._over, []
        return over


class ScriptedPort:
    """The `Transfers` port of the engine model; the driver calls `begin_step` before each step."""

    def __init__(self, script: Script, stored: set[int]) -> None:
        self.started: list[Started] = []
        self.flushed = 0
        self._step = 0
        self._moves = ScriptedMoves(script)
        self._keys: dict[int, int] = {}
        self._store = ScriptedStore(script, stored)
        self._lookups: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}

    def begin_step(self, step: int) -> None:
        self._step = step
        self._store.begin_step(step)
        self.started.clear()

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        lookups = self._lookups.setdefault(request_id, {})
        wanted = tuple(keys)
        if wanted not in lookups:
            lookups[wanted] = (self._store.ask(self._step), self._store.leading(wanted))
        ready, leading = lookups[wanted]
        return leading if ready <= self._step else None

    def start(self, job: Job) -> None:
        self.started.append(Started(job.kind, job.keys))
        if job.kind is JobKind.FETCH or job.kind is JobKind.PUT:
            self._store.start(job, self._step)
        else:
            self._keys[job.job_id] = len(job.keys)
            self._moves.start(job.job_id, self._step)

    def flush(self, job_ids: Sequence[int]) -> int:
        self.flushed += len(job_ids)
        for job_id in job_ids:
            self._moves.flush(job_id, self._step)
        return 0

    def finished(self) -> list[JobDone]:
        moved = [JobDone(job_id, self._keys.pop(job_id)) for job_id in self._moves.take_over(self._step)]
        return moved + self._store.take_over()

    def forget(self, request_id: str) -> None:
        del self._lookups[request_id]
