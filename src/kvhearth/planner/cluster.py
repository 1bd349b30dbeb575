"""A cluster in virtual time: engine models behind a routing policy, with modelled links and a modelled store.

The same `EngineModel`, `ModelledLinks` and routing policies run in the emulator and the router, so a difference between
prediction and measurement is a fault of plumbing or of time, not of rules. Nothing here draws at random,
and no clock enters what is simulated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from time import process_time
from typing import NamedTuple

from kvhearth.engine import EngineModel
from kvhearth.engine.links import ModelledLinks
from kvhearth.engine.ports import EngineConfig, EngineRequest, OffloadMode, Step, StepCost
from kvhearth.errors import UserError
from kvhearth.planner.holders import ClusterHolders, IndexHolders
from kvhearth.planner.outcome import Outcome, Served, summarise
from kvhearth.planner.virtual import VirtualStore, VirtualTransfers
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
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.ports import EngineView, Hits, RouteRequest
from kvhearth.routing.registry import KvParts, make_policy
from kvhearth.routing.ttft import Predictor, TtftCost


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
        ttft_cost: what policy kv-aware predicts with; None = it learns a rate.
        index_bytes: kv-aware sees what a router's index of this size learns from the engines' events; 0 = it knows
            exactly what they hold.
    """

    engines: int
    engine: EngineConfig
    cost: StepCost
    links: Callable[[], ModelledLinks]
    policy: str = "prefix"
    store_chunks: int = 0
    ttft_cost: TtftCost | None = None
    index_bytes: int = 0


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


class _Turn:
    """A request on its way."""

    __slots__ = (
        "chain",
        "due_ns",
        "engine",
        "first_token_ns",
        "hits",
        "index",
        "load",
        "output_tokens",
        "prefill",
        "prompt",
        "route",
        "user",
        "view",
    )

    engine: _Engine  # these from its arrival on
    route: RouteRequest
    view: EngineView
    hits: Hits
    chain: Sequence[int]

    def __init__(self, user: User, index: int, due_ns: int, prompt: tuple[Segment, ...]) -> None:
        self.user = user
        self.index = index
        self.due_ns = due_ns
        self.prompt = prompt
        self.output_tokens = user.turns[index].output_tokens
        self.load = 0
        self.prefill = 0
        self.first_token_ns = 0


class _Engine:
    """One engine, whether it is in a step, and the router's load on it."""

    def __init__(self, name: str, config: ClusterConfig, store: VirtualStore) -> None:
        self.name = name
        self.model = EngineModel(config.engine, config.cost, tell_events=bool(config.index_bytes))
        self.port = VirtualTransfers(config.links(), store)
        self.in_step = False
        self.wake_ns: int | None = None
        self.requests_in_flight = 0
        self.tokens_in_flight = 0
        self.prefill_tokens = 0
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
        self._predictor = Predictor(config.ttft_cost)
        self._now_ns = 0
        self._holders = self._know_holders(store)
        kv = KvParts(self._holders, self._predictor, Random(0))
        self._policy = make_policy(config.policy, kv=kv, rng=Random(0))
        self._keyed = config.policy == KvAware.name
        self._order = count()
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._turns: dict[str, _Turn] = {}
        self._served: list[Served] = []

    def _know_holders(self, store: VirtualStore) -> ClusterHolders | IndexHolders:
        config = self._config
        if not config.index_bytes:
            return ClusterHolders({engine.name: engine.model for engine in self._engines}, store.leading_held)
        holders = IndexHolders(config.index_bytes, lambda: self._now_ns / 1e9, config.engine.blocks_per_chunk)
        store.on_evicted = holders.evicted
        return holders

    def run(self) -> Simulated:
        begun = process_time()
        for user in self._workload.users:
            self._plan_turn(user, 0, user.start_ns, ())
        requests = self._workload.requests
        while len(self._served) < requests:
            if not self._events:
                raise RuntimeError(f"{requests - len(self._served)} requests are stuck")
            at_ns, _, happen = heapq.heappop(self._events)
            self._now_ns = at_ns
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
        turn.chain = content_chain(content, self._config.engine.block_size)
        self._turns[request_id] = turn
        engine.model.submit(
            EngineRequest(
                request_id,
                total_tokens(turn.prompt),
                turn.output_tokens,
                turn.chain,
            )
        )
        self._continue(engine, now_ns)

    def _route(self, turn: _Turn) -> _Engine:
        route = turn.route = self._route_request(turn)
        views = [
            EngineView(
                engine.name,
                engine.requests_in_flight,
                engine.tokens_in_flight,
                engine.prefill_tokens,
                ttft_factor=self._predictor.factor(engine.name),
            )
            for engine in self._engines
        ]
        decision = self._policy.pick(route, views)
        if decision.engine is None:
            raise UserError(
                f"the router refuses: {decision.refusal}", where="--engines", remedy="simulate at least one"
            )
        engine = turn.engine = self._by_name[decision.engine]
        turn.view, turn.hits = views[self._engines.index(engine)], decision.hits
        turn.load, turn.prefill = route.prompt_tokens, max(1, route.prompt_tokens - sum(decision.hits))
        engine.requests_in_flight += 1
        engine.tokens_in_flight += turn.load
        engine.prefill_tokens += turn.prefill
        return engine

    def _route_request(self, turn: _Turn) -> RouteRequest:
        """What the router sees: token ids where the policy looks at them, else text. A user of one turn names no
        session."""
        tokens, session = total_tokens(turn.prompt), turn.user.name if len(turn.user.turns) > 1 else ""
        if self._keyed:
            block = self._config.engine.block_size
            return RouteRequest(
                "model", (), tokens, session, self._holders.keys(content_chain(turn.prompt, block)), block
            )
        pieces = content_chain(turn.prompt, DEFAULT_PIECE_BYTES, WORD_BYTES)[:DEFAULT_MAX_PIECES]
        return RouteRequest("model", pieces, estimate_tokens(tokens * WORD_BYTES), session)

    def _first_token(self, turn: _Turn, now_ns: int) -> None:
        turn.first_token_ns = now_ns
        turn.engine.prefill_tokens -= turn.prefill
        if self._keyed:
            self._holders.settle(turn.engine.name, turn.route.block_keys)
            self._predictor.observe(turn.view, turn.load, turn.hits, (now_ns - turn.due_ns) / 1e9)

    def _continue(self, engine: _Engine, now_ns: int) -> None:
        """Begin the engine's next step if it can; otherwise see to it that transfers wake it."""
        if engine.in_step:
            return
        engine.port.now_ns = now_ns
        step = self._step(engine)
        while not (step.duration_ns or step.waiting_on_transfers) and engine.model.has_work:
            step = self._step(engine)  # it only made way, or has news to take in: no time has passed
        if step.duration_ns:
            engine.in_step = True
            engine.note_usage(step)
            self._at(now_ns + step.duration_ns, lambda now: self._end_step(engine, step, now))
            return
        wake_ns = engine.port.next_ns()
        if wake_ns is not None and wake_ns != engine.wake_ns:
            engine.wake_ns = wake_ns = max(wake_ns, now_ns + 1)
            self._at(wake_ns, lambda now: self._wake(engine, now))

    def _step(self, engine: _Engine) -> Step:
        step = engine.model.step(engine.port)
        if step.kv_events:
            self._holders.told(engine.name, step.kv_events, lambda request_id: self._turns[request_id].chain)
        return step

    def _wake(self, engine: _Engine, now_ns: int) -> None:
        if engine.wake_ns == now_ns:
            engine.wake_ns = None
        self._continue(engine, now_ns)

    def _end_step(self, engine: _Engine, step: Step, now_ns: int) -> None:
        engine.in_step = False
        for request_id in step.sampled:
            turn = self._turns[request_id]
            if not turn.first_token_ns:
                self._first_token(turn, now_ns)
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
