"""The engine without its GPU and without a clock: requests in, steps out, every token accounted for.

`Scheduler` decides what a step computes; here it counts as computed. What KV costs to move and what a step costs to run
are asked of the `Transfers` and `StepCost` that are handed in.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.engine.accounting import overlap, settle
from kvhearth.engine.ports import Counters, EngineConfig, EngineRequest, Finished, Sources, Step, StepCost, Transfers
from kvhearth.engine.request import NEVER, RequestState
from kvhearth.engine.scheduler import Batch, Scheduler
from kvhearth.engine.validate import check_config, check_request, ensure
from kvhearth.errors import UserError


class EngineModel:
    """One engine: queues, blocks, prefix cache, and the tiers behind them.

    Call `step` while `has_work`; after a step with ``waiting_on_transfers`` only once the port has news. A job is
    started in the call of `step` at whose beginning the KV it reads exists, so it may begin at that moment.

    Args:
        config: shape and limits.
        cost: what a step takes; None = no time.
        tell_events: steps carry ``kv_events``.

    Raises:
        UserError: a limit in ``config`` is impossible.
    """

    def __init__(self, config: EngineConfig, cost: StepCost | None = None, *, tell_events: bool = False) -> None:
        check_config(config)
        self.config = config
        self.counters = Counters()
        self._cost = cost
        self._requests: dict[str, RequestState] = {}
        self._scheduler = Scheduler(config, self.counters)
        self._tell_events = tell_events
        if tell_events:
            self._scheduler.tell_events()

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait: in the queue, for a lookup, or for a load."""
        return len(self._scheduler.waiting) + len(self._scheduler.holding)

    @property
    def has_work(self) -> bool:
        """Requests are here, or transfers in flight that a later step has to take in."""
        offload = self._scheduler.offload
        return bool(self._requests) or (offload is not None and offload.busy)

    @property
    def blocks_used(self) -> int:
        """HBM blocks that a request or a transfer holds."""
        return self._scheduler.pool.num_used

    @property
    def kv_usage(self) -> float:
        """Fraction of HBM blocks in use, 0 to 1."""
        return self._scheduler.pool.num_used / self.config.num_blocks

    @property
    def dram_usage(self) -> float:
        """Fraction of the DRAM tier that is filled, 0 to 1; 0 without one."""
        offload = self._scheduler.offload
        return 0.0 if offload is None else len(offload.dram) / offload.dram.capacity

    def submit(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            UserError: it can never run (too long for the model or for HBM), it is malformed, or its id is in use.
        """
        check_request(request, self.config)
        if request.request_id in self._requests:
            raise UserError(f"{request.request_id!r} is in use", where="request_id", remedy="give each request its own")
        offload = self._scheduler.offload
        state = RequestState(request, NEVER if offload is None else offload.first_save(request.prompt_tokens))
        self._requests[state.request_id] = state
        self._scheduler.waiting.append(state)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is. False when it is not (or no longer) here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.drop(request)
        return True

    def reset_prefix_cache(self, reset_external: bool = False) -> bool:
        """Forget cached KV in HBM, and in the engine's DRAM with ``reset_external``; the store is not the engine's.

        False, as in vLLM, while blocks (or chunks) are in use: then that tier keeps what it has.
        """
        done = self._scheduler.pool.reset()
        if reset_external and self._scheduler.offload is not None:
            done = self._scheduler.offload.dram.clear() and done
        return done

    def take_in(self, transfers: Transfers) -> None:
        """Take in what the transfers have finished by now, which `step` does first of all.

        Before an `abort` it has the blocks of an aborted load, done by now, come free in vLLM's order.
        """
        if self._scheduler.offload is not None:
            self._scheduler.offload.take_in(transfers)

    def step(self, transfers: Transfers) -> Step:
        """Schedule one step and account for it as run."""
        step = Step()
        self.counters.steps += 1
        batch, preempted, step.duration_ns = self._scheduler.schedule(transfers)
        if preempted:
            step.preempted.extend(request.request_id for request in preempted)
        if batch:
            if self._cost is not None:
                step.duration_ns += self._duration_ns(self._cost, batch)
            self._run(batch, step)
        else:
            offload = self._scheduler.offload
            stuck = not preempted and not step.duration_ns and (offload is None or not offload.has_news)
            step.waiting_on_transfers = stuck and self.has_work
        if self._tell_events:
            step.kv_events = self._scheduler.take_events()
        return step

    def held_in_hbm(self, hashes: Sequence[int]) -> int:
        """How many leading blocks the prefix cache would hit now; changes nothing."""
        return len(self._scheduler.pool.longest_hit(hashes, len(hashes)))

    def held_in_dram(self, keys: Sequence[int]) -> int:
        """How many leading chunks could be loaded from the engine's DRAM now; changes nothing."""
        offload = self._scheduler.offload
        return 0 if offload is None else offload.dram.leading(keys)

    def block_table(self, request_id: str) -> tuple[int, ...]:
        """The blocks that a request holds, in order; empty when it holds none or is not here."""
        request = self._requests.get(request_id)
        return () if request is None else tuple(request.blocks)

    def check_integrity(self) -> None:
        """For tests: every request is in a queue, every block and chunk is accounted for.

        Raises:
            AssertionError: one is not.
        """
        ensure(self.num_running + self.num_waiting == len(self._requests), "a request is in no queue")
        self._scheduler.check_integrity()

    def _run(self, batch: Batch, step: Step) -> None:
        """The batch's tokens are computed; requests that have all of theirs sample one more."""
        counters = self.counters
        scheduled, sampled = step.scheduled, step.sampled
        finished: list[RequestState] = []
        for request, new_tokens in batch:
            before = request.computed
            request.computed = after = before + new_tokens
            scheduled[request.request_id] = new_tokens
            if request.recomputable:
                again = overlap(request.recomputable, before, after)
                request.reprefill += again
                counters.reprefill_tokens += again
            if after == request.tokens:
                sampled.append(request.request_id)
                if request.sources is None:
                    self._settle(request)
                request.tokens += 1
                if request.tokens == request.total:
                    finished.append(request)
        counters.generation_tokens += len(sampled)
        if finished:
            self._finish(finished, step)

    def _settle(self, request: RequestState) -> None:
        sources = settle(request.prompt, request.begun_at, request.hits, request.recomputable)
        request.sources = sources
        counters = self.counters
        counters.prompt_tokens += request.prompt
        counters.prompt_tokens_hbm += sources.hbm
        counters.prompt_tokens_dram += sources.dram
        counters.prompt_tokens_store += sources.store
        counters.prompt_tokens_compute += sources.compute

    def _finish(self, finished: list[RequestState], step: Step) -> None:
        self._scheduler.retire(finished)
        self.counters.requests_finished += len(finished)
        for request in finished:
            del self._requests[request.request_id]
            step.finished.append(
                Finished(
                    request.request_id,
                    request.prompt,
                    request.total - request.prompt,
                    request.sources or Sources(),
                    request.preemptions,
                    request.reprefill,
                )
            )

    def _duration_ns(self, cost: StepCost, batch: Batch) -> int:
        prefills: list[tuple[int, int]] = []
        n_decode = sum_context = 0
        for request, new_tokens in batch:
            if new_tokens == 1 and request.computed >= request.prompt and request.computed + 1 == request.tokens:
                n_decode += 1
                sum_context += request.tokens
            else:
                prefills.append((new_tokens, request.computed))
        return cost.step_ns(prefills, n_decode, sum_context)
