"""A cluster in virtual time: engine models behind a routing policy, with modelled links and a modelled store.

The same `EngineModel`, `ModelledLinks` and routing policies run in the emulator and the router, so a difference between
prediction and measurement is a fault of plumbing or of time, not of rules. Nothing here draws at random,
and no clock enters what is simulated.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import process_time
from typing import NamedTuple

from kvhearth.engine import EngineModel
from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import EngineConfig, EngineRequest, Job, JobDone, JobKind, OffloadMode, Step, StepCost
from kvhearth.errors import UserError
from kvhearth.planner.outcome import Outcome, Served, summarise
from kvhearth.planner.workload import (
    WORD_BYTES,
    Segment,
    User,
    Workload,
    content_chain,
    output_segment,
    prompt_of,
    total_tokens,
)
from kvhearth.routing.hashing import DEFAULT_MAX_PIECES, DEFAULT_PIECE_BYTES, estimate_tokens
from kvhearth.routing.ports import EngineView, RouteRequest
from kvhearth.routing.registry import make_policy


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What is simulated.

    Args:
        engines: number of engines, all of one shape.
        engine: that shape, with its offload mode.
        cost: durations of steps.
        links: makes one engine's links (called once an engine).
        policy: routing policy by name.
        store_chunks: capacity of the shared store, in chunks (mode shared).
    """

    engines: int
    engine: EngineConfig
    cost: StepCost
    links: Callable[[], ModelledLinks]
    policy: str = "prefix"
    store_chunks: int = 0


class Simulated(NamedTuple):
    """A run's figures, what each client saw, HBM's KV use over busy time (0..1, mean over engines; peak of any), and
    the CPU time that simulating took."""

    outcome: Outcome
    served: list[Served]
    hbm_usage_mean: float
    hbm_usage_peak: float
    cpu_seconds: float


def simulate(workload: Workload, config: ClusterConfig, on_served: Callable[[Served], None] | None = None) -> Simulated:
    """Play the workload to its end. The same arguments give the same result.

    Raises:
        UserError: a request that no engine can hold, or a configuration that the engine refuses.
    """
    return _Cluster(workload, config, on_served).run()


class VirtualStore:
    """Which chunks the shared store holds: least recently used out first."""

    def __init__(self, capacity_chunks: int) -> None:
        self._capacity = capacity_chunks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def leading(self, keys: Sequence[int]) -> int:
        """How many leading keys are present; touches them."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
            self._keys.move_to_end(key)
        return len(keys)

    def put(self, keys: Sequence[int]) -> None:
        """Add chunks, evicting the oldest."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


class VirtualTransfers:
    """The engine's port in virtual time; its driver sets ``now_ns`` before each step."""

    def __init__(self, links: ModelledLinks, store: VirtualStore) -> None:
        self.now_ns = 0
        self._links = links
        self._store = store
        self._order = count()
        self._jobs: list[tuple[int, int, Job]] = []
        self._loads_from_ns = 0
        self._lookups: dict[str, dict[tuple[int, ...], int]] = {}
        self._answers: dict[str, dict[tuple[int, ...], int]] = {}

    def lookup(self, request_id: str, keys: Sequence[int]) -> int | None:
        """See `engine.ports.Transfers`; the store is asked when the modelled round trip is over."""
        wanted = tuple(keys)
        answers = self._answers.setdefault(request_id, {})
        if wanted in answers:
            return answers[wanted]
        ready_ns = self._lookups.setdefault(request_id, {}).setdefault(wanted, self._links.lookup_ns(self.now_ns))
        if ready_ns > self.now_ns:
            return None
        del self._lookups[request_id][wanted]
        answers[wanted] = self._store.leading(wanted)
        return answers[wanted]

    def start(self, job: Job) -> None:
        """See `engine.ports.Transfers`."""
        from_ns = max(self.now_ns, self._loads_from_ns) if job.kind is JobKind.LOAD else self.now_ns
        heapq.heappush(self._jobs, (self._links.done_ns(from_ns, job), next(self._order), job))

    def flush(self, job_ids: Sequence[int]) -> int:
        """See `engine.ports.Transfers`."""
        ends_ns = [done_ns for done_ns, _, job in self._jobs if job.job_id in job_ids]
        self._loads_from_ns = max(ends_ns, default=self.now_ns)
        return max(0, self._loads_from_ns - self.now_ns)

    def finished(self) -> list[JobDone]:
        """See `engine.ports.Transfers`. A put becomes visible, and a fetch is checked, when it ends."""
        done = []
        while self._jobs and self._jobs[0][0] <= self.now_ns:
            job = heapq.heappop(self._jobs)[2]
            arrived = len(job.keys)
            if job.kind is JobKind.PUT:
                self._store.put(job.keys)
            elif job.kind is JobKind.FETCH:
                arrived = self._store.leading(job.keys)
            done.append(JobDone(job.job_id, arrived))
        return done

    def forget(self, request_id: str) -> None:
        """See `engine.ports.Transfers`."""
        self._lookups.pop(request_id, None)
        self._answers.pop(request_id, None)

    def next_ns(self) -> int | None:
        """When the port will next have news, or None. Answers that are there and not yet taken are no news."""
        times = [ready for lookups in self._lookups.values() for ready in lookups.values() if ready > self.now_ns]
        if self._jobs:
            times.append(self._jobs[0][0])
        return min(times, default=None)


class _Turn:
    """A request on its way."""

    __slots__ = ("due_ns", "engine", "first_token_ns", "index", "load", "output_tokens", "prompt", "user")

    engine: _Engine  # from its arrival on

    def __init__(self, user: User, index: int, due_ns: int, prompt: tuple[Segment, ...]) -> None:
        self.user = user
        self.index = index
        self.due_ns = due_ns
        self.prompt = prompt
        self.output_tokens = user.turns[index].output_tokens
        self.load = 0
        self.first_token_ns = 0


class _Engine:
    """One engine, whether it is in a step, and the router's load on it."""

    def __init__(self, name: str, config: ClusterConfig, store: VirtualStore) -> None:
        self.name = name
        self.model = EngineModel(config.engine, config.cost)
        self.port = VirtualTransfers(config.links(), store)
        self.in_step = False
        self.wake_ns: int | None = None
        self.requests_in_flight = 0
        self.tokens_in_flight = 0
        self.busy_ns = 0
        self.usage_ns = 0.0
        self.usage_peak = 0.0

    def note_usage(self, step: Step) -> None:
        usage = self.model.kv_usage
        self.busy_ns += step.duration_ns
        self.usage_ns += usage * step.duration_ns
        self.usage_peak = max(self.usage_peak, usage)


class _Cluster:
    def __init__(self, workload: Workload, config: ClusterConfig, on_served: Callable[[Served], None] | None) -> None:
        self._workload = workload
        self._config = config
        self._on_served = on_served
        store = VirtualStore(config.store_chunks if config.engine.mode is OffloadMode.SHARED else 0)
        self._engines = [_Engine(f"engine-{i}", config, store) for i in range(config.engines)]
        self._by_name = {engine.name: engine for engine in self._engines}
        self._policy = make_policy(config.policy)
        self._order = count()
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._turns: dict[str, _Turn] = {}
        self._served: list[Served] = []

    def run(self) -> Simulated:
        begun = process_time()
        for user in self._workload.users:
            self._plan_turn(user, 0, user.start_ns, ())
        requests = self._workload.requests
        while len(self._served) < requests:
            if not self._events:
                raise RuntimeError(f"{requests - len(self._served)} requests are stuck")
            at_ns, _, happen = heapq.heappop(self._events)
            happen(at_ns)
        return self._result(process_time() - begun)

    def _at(self, at_ns: int, happen: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._order), happen))

    def _plan_turn(self, user: User, index: int, after_ns: int, conversation: tuple[Segment, ...]) -> None:
        turn = user.turns[index]
        due_ns = after_ns + turn.delay_ns
        request = _Turn(user, index, due_ns, prompt_of(conversation, turn))
        self._at(due_ns, lambda now: self._arrive(request, now))

    def _arrive(self, turn: _Turn, now_ns: int) -> None:
        engine = self._route(turn)
        request_id = f"{turn.user.name}/{turn.index}"
        content = (*turn.prompt, output_segment(turn.prompt, turn.output_tokens))
        self._turns[request_id] = turn
        engine.model.submit(
            EngineRequest(
                request_id,
                total_tokens(turn.prompt),
                turn.output_tokens,
                content_chain(content, self._config.engine.block_size),
            )
        )
        self._continue(engine, now_ns)

    def _route(self, turn: _Turn) -> _Engine:
        pieces = content_chain(turn.prompt, DEFAULT_PIECE_BYTES, WORD_BYTES)[:DEFAULT_MAX_PIECES]
        turn.load = estimate_tokens(total_tokens(turn.prompt) * WORD_BYTES)
        views = [EngineView(e.name, e.requests_in_flight, e.tokens_in_flight) for e in self._engines]
        decision = self._policy.pick(RouteRequest("model", pieces, turn.load), views)
        if decision.engine is None:
            raise UserError(
                f"the router refuses: {decision.refusal}", where="--engines", remedy="simulate at least one"
            )
        engine = turn.engine = self._by_name[decision.engine]
        engine.requests_in_flight += 1
        engine.tokens_in_flight += turn.load
        return engine

    def _continue(self, engine: _Engine, now_ns: int) -> None:
        """Begin the engine's next step if it can; otherwise see to it that transfers wake it."""
        if engine.in_step:
            return
        engine.port.now_ns = now_ns
        step = engine.model.step(engine.port)
        while not (step.duration_ns or step.waiting_on_transfers) and engine.model.has_work:
            step = engine.model.step(engine.port)  # it only made way, or has news to take in: no time has passed
        if step.duration_ns:
            engine.in_step = True
            engine.note_usage(step)
            self._at(now_ns + step.duration_ns, lambda now: self._end_step(engine, step, now))
            return
        wake_ns = engine.port.next_ns()
        if wake_ns is not None and wake_ns != engine.wake_ns:
            engine.wake_ns = wake_ns = max(wake_ns, now_ns + 1)
            self._at(wake_ns, lambda now: self._wake(engine, now))

    def _wake(self, engine: _Engine, now_ns: int) -> None:
        if engine.wake_ns == now_ns:
            engine.wake_ns = None
        self._continue(engine, now_ns)

    def _end_step(self, engine: _Engine, step: Step, now_ns: int) -> None:
        engine.in_step = False
        for request_id in step.sampled:
            turn = self._turns[request_id]
            turn.first_token_ns = turn.first_token_ns or now_ns
        for finished in step.finished:
            self._finish(self._turns.pop(finished.request_id), finished.prompt_tokens, now_ns)
        self._continue(engine, now_ns)

    def _finish(self, turn: _Turn, prompt_tokens: int, now_ns: int) -> None:
        engine = turn.engine
        engine.requests_in_flight -= 1
        engine.tokens_in_flight -= turn.load
        user, index = turn.user, turn.index
        served = Served(
            user.name, index, turn.due_ns, turn.first_token_ns, now_ns, prompt_tokens, turn.output_tokens, engine.name
        )
        self._served.append(served)
        if self._on_served:
            self._on_served(served)
        if index + 1 < len(user.turns):
            conversation = (*turn.prompt, output_segment(turn.prompt, turn.output_tokens))
            self._plan_turn(user, index + 1, now_ns, conversation)

    def _result(self, cpu_seconds: float) -> Simulated:
        busy_ns = sum(engine.busy_ns for engine in self._engines)
        return Simulated(
            summarise(self._served, [engine.model.counters for engine in self._engines], self._workload.slo),
            self._served,
            sum(engine.usage_ns for engine in self._engines) / busy_ns if busy_ns else 0.0,
            max(engine.usage_peak for engine in self._engines),
            cpu_seconds,
        )
