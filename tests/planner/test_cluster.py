"""The simulated cluster repeats itself, and agrees with the cost model and with common sense about offloading."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from kvhearth.cost import CostModel
from kvhearth.engine.links import modelled_links
from kvhearth.engine.ports import EngineConfig, OffloadMode
from kvhearth.planner.cluster import ClusterConfig, simulate
from kvhearth.planner.workload import Segment, Turn, User, Workload
from kvhearth.routing.registry import POLICY_NAMES
from kvhearth.routing.ttft import ModelledCost

COST = CostModel("llama-3.1-8b", "h100-sxm")
CHUNK = COST.kv_bytes(16)
SECOND = 1_000_000_000


def cluster(
    mode: OffloadMode, *, blocks: int = 320, engines: int = 2, dram: int = 100_000, policy: str = "prefix"
) -> ClusterConfig:
    engine = EngineConfig(
        num_blocks=blocks, mode=mode, dram_chunks=dram if mode is not OffloadMode.NONE else 0, chunk_bytes=CHUNK
    )
    links = partial(modelled_links, COST, "ethernet-100g", CHUNK)
    return ClusterConfig(engines, engine, COST, links, policy, 100_000, ModelledCost(COST, op_bytes=CHUNK))


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


@pytest.mark.parametrize("mode", OffloadMode)
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_everything_and_the_same_twice(policy: str, mode: OffloadMode) -> None:
    first, again = (simulate(pressed(12), cluster(mode, policy=policy)) for _ in range(2))
    assert first.outcome.requests == 24
    assert first.served == again.served


def test_kv_aware_finds_what_a_round_robin_router_scatters() -> None:
    by_policy = {
        policy: simulate(pressed(), cluster(OffloadMode.NATIVE, blocks=1000, engines=4, policy=policy)).outcome
        for policy in ("kv-aware", "round-robin")
    }
    computed = {policy: outcome.prompt_tokens_by_source["compute"] for policy, outcome in by_policy.items()}
    assert computed["kv-aware"] < 0.9 * computed["round-robin"]
    assert by_policy["kv-aware"].ttft_p99_seconds <= by_policy["round-robin"].ttft_p99_seconds


@pytest.mark.parametrize("mode", OffloadMode)
def test_a_routers_index_learns_from_events_what_the_engines_hold(mode: OffloadMode) -> None:
    exact = cluster(mode, engines=4, policy="kv-aware")
    known = simulate(pressed(), exact).outcome.prompt_tokens_by_source
    learnt = simulate(pressed(), replace(exact, index_bytes=1 << 24)).outcome.prompt_tokens_by_source
    assert learnt["compute"] < 1.15 * known["compute"]
    assert simulate(pressed(), replace(exact, index_bytes=1 << 24)).outcome.prompt_tokens_by_source == learnt


def test_one_hot_prefix_does_not_gather_on_its_holder() -> None:
    """Router case 9: one hot prefix over 4 engines."""
    hot = Segment(1, 2000)
    users = tuple(user(f"u{i}", Turn((hot, Segment(100 + i, 40)), 60), start=i * SECOND // 250) for i in range(160))
    run = simulate(Workload("burst", users), cluster(OffloadMode.NONE, blocks=8000, engines=4, policy="kv-aware"))
    sent = Counter(served.engine for served in run.served)
    assert max(sent.values()) / (160 / 4) <= 1.5
    assert run.outcome.prompt_tokens_by_source["hbm"] >= 156 * 2000
