"""Whoever hears every KV event knows at each step what HBM and DRAM hold; whoever hears none pays nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.engine import EngineConfig, EngineModel, KvEvent, KvTier, NoTransfers, OffloadMode

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12
)


def small(**changes: object) -> EngineConfig:
    shape: dict[str, object] = {
        "num_blocks": 24,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 90,
        "mode": OffloadMode.SHARED,
        "blocks_per_chunk": 2,
        "dram_chunks": 5,
        "chunk_bytes": 100,
        **changes,
    }
    return EngineConfig(**shape)  # type: ignore[arg-type]


class Listener:
    """What a subscriber makes of the events: ten lines, no knowledge of the engine."""

    def __init__(self) -> None:
        self.hbm: Counter[int] = Counter()
        self.dram: set[int] = set()
        self.put: set[int] = set()

    def hear(self, event: KvEvent) -> None:
        if event.tier is KvTier.HBM and not event.keys:
            self.hbm.clear()
        elif event.tier is KvTier.HBM:
            self.hbm.update(event.keys) if event.stored else self.hbm.subtract(event.keys)
        elif event.tier is KvTier.STORE:
            self.put.update(event.keys)
        elif event.stored:
            self.dram.update(event.keys)
        else:
            self.dram -= set(event.keys) if event.keys else set(self.dram)


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, st.sampled_from([OffloadMode.NATIVE, OffloadMode.SHARED]), st.sampled_from(["eager", "lazy"]))
def test_events_add_up_to_what_the_tiers_hold(scripted, prompts, arrivals, mode, admission) -> None:
    engine = EngineModel(small(mode=mode, dram_admission=admission), tell_events=True)
    port, made, listener = scripted(), prompts(4), Listener()
    waiting = list(arrivals)
    hashes: dict[str, tuple[int, ...]] = {}
    for step in range(3000):
        while waiting and waiting[0][0] <= step:
            _, group, prompt, output = waiting.pop(0)
            request = made.request([(group, i) for i in range(10)], prompt, output)
            hashes[request.request_id] = request.block_hashes
            engine.submit(request)
        if not engine.has_work and not waiting:
            break
        for event in engine.step(port).kv_events:
            if event.request_id:
                of = hashes[event.request_id]
                assert event.keys == of[event.first : event.first + len(event.keys)]
            listener.hear(event)
        pool, dram = engine._scheduler.pool, engine._scheduler.offload.dram
        held = Counter(key for block in range(24) if (key := pool.content(block)) is not None)
        assert +listener.hbm == held
        assert min(listener.hbm.values(), default=0) >= 0
        assert listener.dram == {key for key in dram._readers if dram.ready(key)}
        assert listener.put <= port.store
    assert not engine.has_work
    assert listener.put == port.store


def test_emptying_the_tiers_is_told_with_the_next_step(scripted, prompts, finish) -> None:
    engine = EngineModel(small(), tell_events=True)
    port, made, listener = scripted(), prompts(4), Listener()
    engine.submit(made.request(["a", "b", "c", "d"], 17, 1))
    while engine.has_work:
        for event in engine.step(port).kv_events:
            listener.hear(event)
    assert listener.hbm
    assert listener.dram
    assert engine.reset_prefix_cache(reset_external=True)
    engine.submit(made.request([], 2, 1))
    told = engine.step(port).kv_events
    assert KvEvent(KvTier.HBM, False, ()) in told
    assert KvEvent(KvTier.DRAM, False, ()) in told
    for event in told:
        listener.hear(event)
    assert not +listener.hbm
    assert not listener.dram


def test_an_engine_that_was_not_asked_to_tell_tells_nothing(prompts) -> None:
    engine = EngineModel(small(mode=OffloadMode.NONE))
    engine.submit(prompts(4).request(["a", "b"], 9, 3))
    while engine.has_work:
        assert engine.step(NoTransfers()).kv_events == []
