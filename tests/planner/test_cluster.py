"""The simulated cluster repeats itself, and agrees with the cost model and with common sense about offloading."""

from collections import OrderedDict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel
from kvhearth.engine.links import modelled_links
from kvhearth.engine.ports import EngineConfig, Job, JobDone, JobKind, OffloadMode
from kvhearth.planner.cluster import ClusterConfig, VirtualStore, VirtualTransfers, simulate
from kvhearth.planner.workload import Segment, Turn, User, Workload

COST = CostModel("llama-3.1-8b", "h100-sxm")
CHUNK = COST.kv_bytes(16)
SECOND = 1_000_000_000


def cluster(
    mode: OffloadMode, *, blocks: int = 320, engines: int = 2, dram: int = 100_000, policy: str = "prefix"
) -> ClusterConfig:
    engine = EngineConfig(
        num_blocks=blocks, mode=mode, dram_chunks=dram if mode is not OffloadMode.NONE else 0, chunk_bytes=CHUNK
    )
    return ClusterConfig(engines, engine, COST, partial(modelled_links, COST, "ethernet-100g", CHUNK), policy, 100_000)


def user(name: str, *turns: Turn, start: int = 0) -> User:
    return User(name, "t", start, turns)


def pressed(users: int = 40) -> Workload:
    """Conversations over one long system prompt, far more of them than HBM holds."""
    system = Segment(1, 1024)
    scripts = []
    for i in range(users):
        first = Turn((system, Segment(100 + i, 900)), 60)
        second = Turn((Segment(500 + i, 100),), 60, SECOND, continues=True)
        scripts.append(user(f"u{i}", first, second, start=i * SECOND // 20))
    return Workload("pressed", tuple(scripts))


def test_a_lone_request_takes_what_the_cost_model_says() -> None:
    run = simulate(Workload("one", (user("u", Turn((Segment(1, 1000),), 3), start=SECOND),)), cluster(OffloadMode.NONE))
    (served,) = run.served
    prefill = COST.prefill_ns(1000)
    assert served.first_token_ns - served.due_ns == prefill
    assert served.finished_ns - served.first_token_ns == COST.step_ns((), 1, 1001) + COST.step_ns((), 1, 1002)
    assert run.outcome.ttft_p50_seconds == pytest.approx(prefill / 1e9)
    assert run.outcome.prompt_tokens_by_source == {"hbm": 0, "dram": 0, "store": 0, "compute": 1000}


@pytest.mark.parametrize("mode", OffloadMode)
def test_the_same_run_twice_is_the_same(mode: OffloadMode) -> None:
    first, again = (simulate(pressed(), cluster(mode)) for _ in range(2))
    assert first.outcome == again.outcome
    assert first.served == again.served


@pytest.mark.parametrize("mode", OffloadMode)
def test_every_request_is_served_and_every_prompt_token_has_one_source(mode: OffloadMode) -> None:
    run = simulate(pressed(), cluster(mode))
    assert run.outcome.requests == 80
    assert run.outcome.errors == 0
    assert sum(run.outcome.prompt_tokens_by_source.values()) == sum(s.prompt_tokens for s in run.served)
    assert 0 < run.hbm_usage_mean <= run.hbm_usage_peak <= 1


def test_offloading_under_pressure_moves_hits_and_time_together() -> None:
    """A simulator in which hits rise and latency does not move would be wrong (seen elsewhere: BLIS issue 1699)."""
    none, native, shared = (simulate(pressed(), cluster(mode)).outcome for mode in OffloadMode)
    assert none.prompt_tokens_by_source["dram"] == none.prompt_tokens_by_source["store"] == 0
    assert native.prompt_tokens_by_source["compute"] < none.prompt_tokens_by_source["compute"]
    assert native.throughput_tokens_per_second > none.throughput_tokens_per_second
    assert native.ttft_p50_seconds < none.ttft_p50_seconds
    assert native.reprefills_avoided > 0
    assert shared.prompt_tokens_by_source["store"] > 0


def test_one_engines_prefill_is_anothers_through_the_store() -> None:
    prompt = (Segment(7, 2048),)
    two = Workload("two", (user("a", Turn(prompt, 4)), user("b", Turn(prompt, 4), start=5 * SECOND)))
    by_mode = {
        mode: simulate(two, cluster(mode, policy="round-robin")).outcome.prompt_tokens_by_source for mode in OffloadMode
    }
    assert by_mode[OffloadMode.NATIVE]["compute"] == 2 * 2048
    assert by_mode[OffloadMode.SHARED]["store"] == 2047  # all its chunks are there, but the last token must be computed
    assert by_mode[OffloadMode.SHARED]["compute"] == 2048 + 1


def test_the_router_sees_the_prefix_and_keeps_it_on_one_engine() -> None:
    prompt = (Segment(7, 2000),)
    users = tuple(user(f"u{i}", Turn((*prompt, Segment(50 + i, 20)), 2), start=i * SECOND) for i in range(6))
    run = simulate(Workload("w", users), cluster(OffloadMode.NONE))
    assert len({served.engine for served in run.served}) == 1
    assert run.outcome.prompt_tokens_by_source["hbm"] == 5 * 2000


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))),
)
def test_the_store_keeps_what_was_used_last(capacity: int, calls: list[tuple[bool, list[int]]]) -> None:
    store, held = VirtualStore(capacity), OrderedDict[int, None]()
    for is_put, keys in calls:
        if is_put:
            store.put(keys)
            for key in keys:
                held.pop(key, None)
                held[key] = None
            while len(held) > capacity:
                held.popitem(last=False)
        else:
            expected = 0
            while expected < len(keys) and keys[expected] in held:
                held.move_to_end(keys[expected])
                expected += 1
            assert store.leading(keys) == expected
        assert len(store) == len(held)


def test_transfers_end_when_the_links_say_and_a_put_is_seen_only_then() -> None:
    links, store = modelled_links(COST, "ethernet-100g", CHUNK), VirtualStore(10)
    port = VirtualTransfers(links, store)
    port.start(Job(1, JobKind.PUT, (5, 6), 2 * CHUNK))
    ends = port.next_ns()
    assert ends is not None
    assert ends > COST.transfer_ns(2 * CHUNK, "ethernet-100g", 2 * CHUNK) // 2
    port.now_ns = ends - 1
    assert port.finished() == []
    assert len(store) == 0
    port.now_ns = ends
    assert port.finished() == [JobDone(1, 2)]
    assert len(store) == 2


def test_a_fetch_of_what_was_evicted_meanwhile_comes_short() -> None:
    store = VirtualStore(10)
    port = VirtualTransfers(modelled_links(COST, "ethernet-100g", CHUNK), store)
    store.put([5, 6])
    port.start(Job(1, JobKind.FETCH, (5, 6, 7), 3 * CHUNK))
    port.now_ns = port.next_ns() or 0
    assert port.finished() == [JobDone(1, 2)]


def test_a_lookup_is_answered_after_the_round_trip_and_once() -> None:
    store = VirtualStore(10)
    port = VirtualTransfers(modelled_links(COST, "ethernet-100g", CHUNK), store)
    assert port.lookup("r", [1, 2]) is None
    store.put([1])
    assert port.lookup("r", [1, 2]) is None
    port.now_ns = port.next_ns() or 0
    assert port.lookup("r", [1, 2]) == 1
    store.put([2])
    assert port.lookup("r", [1, 2]) == 1
    port.forget("r")
    assert port.lookup("r", [1, 2]) is None
