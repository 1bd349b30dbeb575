"""Time to first token is predicted from what the cost model says of its parts, and corrected by what is observed."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.cost import CostModel
from kvhearth.errors import UserError
from kvhearth.routing.ports import EngineView, Hits
from kvhearth.routing.ttft import FACTOR_LIMIT, Correction, LearnedCost, ModelledCost, Predictor

MODEL = CostModel("llama-3.1-8b", "h100-sxm")
IDLE = EngineView("a", 0, 0)


def test_an_idle_engine_takes_what_the_cost_model_says():
    prediction = Predictor(ModelledCost(MODEL)).predict(IDLE, 5000, Hits(hbm=2000))
    assert prediction.seconds == MODEL.prefill_ns(3000, 2000) / 1e9
    assert (prediction.queue_seconds, prediction.load_seconds) == (0, 0)


def test_loads_cost_what_their_links_take_and_the_store_passes_through_dram():
    predictor = Predictor(ModelledCost(MODEL, "ethernet-100g", op_bytes=2**21))
    dram = predictor.predict(IDLE, 5000, Hits(dram=4000))
    store = predictor.predict(IDLE, 5000, Hits(store=4000))
    nbytes = MODEL.kv_bytes(4000)
    assert dram.load_seconds == MODEL.dram_load_ns(nbytes) / 1e9
    assert store.load_seconds - dram.load_seconds == pytest.approx(
        MODEL.transfer_ns(nbytes, "ethernet-100g", 2**21) / 1e9
    )
    assert dram.compute_seconds == store.compute_seconds == MODEL.prefill_ns(1000, 4000) / 1e9


def test_prompts_queued_ahead_are_waited_for():
    predictor = Predictor(ModelledCost(MODEL))
    queued = predictor.predict(EngineView("a", 3, 20_000, prefill_tokens=8192), 100, Hits())
    assert queued.queue_seconds == pytest.approx(MODEL.prefill_ns(8192) / 1e9)


def test_requests_that_others_sent_count_by_the_engines_own_account():
    predictor = Predictor(LearnedCost(1000))
    for _ in range(5):
        predictor.observe(IDLE, 600, Hits(hbm=100), 0.5)
    ours = EngineView("a", requests_in_flight=6, tokens_in_flight=0, waiting=2, running=4)
    assert predictor.queued_tokens(ours) == 0
    assert predictor.queued_tokens(ours._replace(waiting=4)) == 1000
    assert predictor.queued_tokens(ours._replace(running=40)) == 1000  # of 38 foreign ones, 2 wait
    assert predictor.queued_tokens(ours._replace(waiting=0, running=40, prefill_tokens=7)) == 7


def test_the_factor_finds_an_engine_that_is_slower_and_the_prediction_follows():
    predictor = Predictor(ModelledCost(MODEL))
    rng = Random(1)
    for _ in range(200):
        tokens = rng.randrange(2000, 20_000)
        true_seconds = 2.5 * MODEL.prefill_ns(tokens) / 1e9
        predictor.observe(EngineView("a", 1, 0), tokens, Hits(), true_seconds * rng.uniform(0.8, 1.25))
    view = EngineView("a", 0, 0, ttft_factor=predictor.factor("a"))
    assert predictor.predict(view, 10_000, Hits()).seconds == pytest.approx(
        2.5 * MODEL.prefill_ns(10_000) / 1e9, rel=0.15
    )
    assert predictor.factor("b") == 1.0


def test_observations_of_requests_sent_long_before_do_not_add_up():
    """A hundred requests sent before the first answer all come out twice as slow: that is still twice, not more."""
    predictor = Predictor(LearnedCost(10_000))
    for _ in range(100):
        predictor.observe(EngineView("a", 100, 0, prefill_tokens=50_000), 50_000, Hits(), 20.0)
    seconds = predictor.predict(EngineView("a", 0, 0, ttft_factor=predictor.factor("a")), 100_000, Hits()).seconds
    assert seconds == pytest.approx(20.0, rel=0.2)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))))
def test_whatever_is_observed_the_factor_stays_bounded(observations: list[tuple[float, float]]):
    correction = Correction()
    for predicted, observed in observations:
        correction.observe("a", predicted, observed)
        assert 1 / FACTOR_LIMIT <= correction.factor("a") <= FACTOR_LIMIT


def test_one_outlier_moves_it_little():
    correction = Correction()
    correction.observe("a", 0.5, 3600)
    assert correction.factor("a") < 1.25


def test_milliseconds_of_network_are_not_a_slow_engine():
    correction = Correction()
    for _ in range(100):
        correction.observe("a", 0.001, 0.004)
    assert correction.factor("a") < 1.2


def test_a_slow_engine_that_gets_nothing_any_more_is_tried_again():
    correction = Correction()
    for _ in range(50):
        correction.observe("slow", 1, 10)
    assert correction.factor("slow") > 3.9
    for _ in range(300):
        correction.observe("other", 1, 1)
    assert correction.factor("slow") < 1.1


def test_a_target_that_left_is_forgotten():
    predictor = Predictor()
    for _ in range(20):
        predictor.observe(EngineView("a", 0, 0), 5000, Hits(), 60)
        predictor.observe(EngineView("b", 0, 0), 5000, Hits(), 1)
    assert predictor.factor("a") > 1.2
    predictor.forget("a")
    assert predictor.factor("a") == 1.0


@pytest.mark.parametrize("true_rate", [40, 900, 60_000])
def test_without_a_cost_model_the_rate_is_learned(true_rate: int):
    predictor = Predictor(LearnedCost())
    rng = Random(3)
    for _ in range(60):
        tokens = rng.randrange(500, 30_000)
        predictor.observe(IDLE, tokens, Hits(), tokens / true_rate)
    view = IDLE._replace(ttft_factor=predictor.factor("a"))
    assert predictor.predict(view, 10_000, Hits()).seconds == pytest.approx(10_000 / true_rate, rel=0.25)


@pytest.mark.parametrize("true_rate", [500, 90_000])
def test_what_all_targets_have_in_common_is_no_reason_to_prefer_the_one_observed(true_rate: int):
    predictor = Predictor(LearnedCost())
    for _ in range(3):
        predictor.observe(IDLE, 5000, Hits(), 5000 / true_rate)
    assert predictor.factor("a") == pytest.approx(1, abs=0.1)


def test_without_a_cost_model_nearer_tiers_are_still_nearer():
    cost = LearnedCost()
    assert 0 < cost.load_seconds(1000, 0) < cost.load_seconds(0, 1000) < cost.compute_seconds(1000, 0)


def test_a_rate_out_of_range_is_refused():
    with pytest.raises(UserError, match="prefill tokens per second"):
        LearnedCost(0)


def test_an_unknown_link_to_the_store_is_refused():
    with pytest.raises(UserError):
        ModelledCost(MODEL, "carrier-pigeon")
