"""Engines come, change, drain, break and leave; what may be picked follows at once, and nobody is forgotten."""

from __future__ import annotations

import pytest

from kvhearth.router.config import Limits, Resilience
from kvhearth.router.discovery.member import Member
from kvhearth.router.engines import Engine, Target
from kvhearth.router.fleet import MOST_REMEMBERED, Fleet

RESILIENCE = Resilience(failures_to_open=2, open_seconds=1.0, slow_start_seconds=10.0)
CARDS = [{"id": "m"}]


class Heard:
    """What the fleet told."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.left: list[str] = []
        self.lost: list[str] = []
        self.rooms = 0

    def engine_came(self, engine: Engine) -> None:
        self.came.append(engine.name)

    def engine_left(self, engine: Engine) -> None:
        self.left.append(engine.name)

    def target_lost(self, target: Target) -> None:
        self.lost.append(target.name)

    def room_made(self) -> None:
        self.rooms += 1


def member(name: str, **more) -> Member:
    return Member(name, f"http://127.0.0.1:{8000 + int(name[-1])}", **more)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def fleet(heard) -> Fleet:
    fleet = Fleet(Limits(max_requests_per_engine=100), RESILIENCE, heard)
    fleet.update([member("e0"), member("e1")])
    for engine in fleet.engines:
        fleet.mark_up(engine, CARDS, now=0.0)
    return fleet


def names(targets) -> list[str] | None:
    return None if targets is None else [target.name for target in targets]


def test_those_that_are_up_serve_their_models(fleet):
    assert names(fleet.serving("m")) == ["e0", "e1"]
    assert fleet.serving("other") is None


def test_an_engine_that_comes_is_told_and_serves_once_it_is_up(fleet, heard):
    fleet.update([member("e0"), member("e1"), member("e2")])
    assert heard.came == ["e0", "e1", "e2"]
    assert names(fleet.serving("m")) == ["e0", "e1"]
    fleet.mark_up(fleet.engine("e2"), CARDS, now=1.0)
    assert names(fleet.serving("m")) == ["e0", "e1", "e2"]


def test_one_that_leaves_is_picked_no_more_and_ends_what_it_has(fleet, heard):
    [target] = fleet.engine("e0").targets
    target.load(10, 10)
    fleet.update([member("e1")])
    assert heard.left == ["e0"]
    assert names(fleet.serving("m")) == ["e1"]
    assert "e0" not in fleet.targets
    assert fleet.gone() == []
    target.unload(10, 0)
    assert [engine.name for engine in fleet.gone()] == ["e0"]
    assert fleet.leaving == []


def test_another_address_under_the_same_name_is_another_engine(fleet, heard):
    old = fleet.engine("e0")
    fleet.update([Member("e0", "http://127.0.0.1:9999"), member("e1")])
    new = fleet.engine("e0")
    assert new is not old
    assert (new.port, new.healthy) == (9999, False)
    assert names(fleet.serving("m")) == ["e1"]
    assert fleet.targets["e0"] is new.targets[0]
    assert (heard.came, heard.left) == (["e0", "e1", "e0"], ["e0"])


def test_other_labels_are_the_same_engine(fleet, heard):
    engine = fleet.engine("e0")
    fleet.update([member("e0", role="prefill"), member("e1")])
    assert fleet.engine("e0") is engine
    assert names(fleet.serving("m")) == ["e1"]
    assert names(fleet.prefilling("m")) == ["e0"]
    assert heard.left == []


@pytest.mark.parametrize("how", ["operator", "discovery"])
def test_one_that_drains_gets_nothing_new(fleet, how):
    engine = fleet.engine("e0")
    if how == "operator":
        fleet.drain(engine, drained=True)
    else:
        fleet.update([member("e0", draining=True), member("e1")])
    assert engine.state == "draining"
    assert names(fleet.serving("m")) == ["e1"]
    assert [engine.name for engine in fleet.healthy()] == ["e1"]
    fleet.drain(engine, drained=False)
    fleet.update([member("e0"), member("e1")])
    assert names(fleet.serving("m")) == ["e0", "e1"]


def test_a_model_whose_engines_have_all_left_is_known_and_served_by_nobody(fleet):
    fleet.update([])
    assert fleet.serving("m") == []
    assert fleet.serving("other") is None


def test_only_so_many_such_models_are_remembered(fleet):
    for number in range(MOST_REMEMBERED + 1):
        fleet.mark_up(fleet.engine("e1"), [{"id": f"m{number}"}], now=0.0)
        fleet.update([member("e0")])
        fleet.update([member("e0"), member("e1")])
    assert fleet.serving("m0") is None
    assert fleet.serving("m1") == []


def test_a_declared_model_is_known_before_any_engine_came(heard):
    fleet = Fleet(Limits(), RESILIENCE, heard, ["declared"])
    assert fleet.serving("declared") == []
    fleet.update([member("e0", models=("labelled",))])
    assert fleet.serving("labelled") == []


def test_who_only_prefills_answers_where_no_other_does(fleet):
    fleet.update([member("e0", role="prefill"), member("e1", role="decode")])
    assert (names(fleet.serving("m")), names(fleet.prefilling("m"))) == (["e1"], ["e0"])
    fleet.mark_down(fleet.engine("e1"), "gone", unreachable=True)
    assert (names(fleet.serving("m")), names(fleet.prefilling("m"))) == (["e0"], [])


def test_an_engine_whose_breaker_opens_is_left_alone_then_tried_one_request_at_a_time(fleet):
    engine = fleet.engine("e0")
    fleet.failed(engine, 100.0)
    assert names(fleet.serving("m")) == ["e0", "e1"]
    fleet.failed(engine, 100.0)
    assert (engine.state, names(fleet.serving("m"))) == ("broken", ["e1"])
    fleet.sweep(101.0)
    assert (engine.state, engine.capacity.most) == ("trial", 1)
    assert names(fleet.serving("m")) == ["e0", "e1"]
    fleet.answered(engine, 200, 101.1)
    assert (engine.state, engine.capacity.most) == ("healthy", 100)


def test_where_every_breaker_is_open_all_serve_for_that_is_better_than_none(fleet):
    for engine in fleet.engines:
        fleet.failed(engine, 0.0)
        fleet.failed(engine, 0.0)
    assert names(fleet.serving("m")) == ["e0", "e1"]


def test_health_does_not_touch_the_load(fleet):
    engine = fleet.engine("e0")
    engine.targets[0].load(10, 5)
    fleet.mark_down(engine, "late", unreachable=False)
    fleet.mark_up(engine, CARDS, now=5.0)
    assert (engine.requests_in_flight, engine.tokens_in_flight, engine.targets[0].prefill_tokens) == (1, 10, 5)


def test_an_engine_that_has_come_up_gets_its_share_little_by_little(fleet):
    for _ in range(20):
        fleet.engine("e0").targets[0].load(1, 0)
    fleet.update([member("e0"), member("e1"), member("e2")])
    late = fleet.engine("e2")
    fleet.mark_down(fleet.engine("e1"), "gone", unreachable=True)
    fleet.mark_up(late, CARDS, now=100.0)
    seen = []
    for now in (100.0, 105.0, 110.0):
        fleet.sweep(now)
        seen.append(late.capacity.most)
    assert seen == [3, 11, 100]


def test_where_all_are_cold_nobody_is_held_back(fleet):
    fleet.sweep(1.0)
    assert [engine.capacity.most for engine in fleet.engines] == [100, 100]


def test_other_limits_hold_at_once(fleet):
    fleet.follow(Limits(max_requests_per_engine=7), RESILIENCE, ["declared"])
    assert fleet.engine("e0").capacity.most == 7
    assert fleet.serving("declared") == []


def test_each_rank_is_a_target(heard):
    fleet = Fleet(Limits(), RESILIENCE, heard)
    fleet.update([member("e0", ranks=2)])
    fleet.mark_up(fleet.engine("e0"), CARDS, now=0.0)
    assert names(fleet.serving("m")) == ["e0#0", "e0#1"]
    fleet.mark_down(fleet.engine("e0"), "gone", unreachable=True)
    assert heard.lost == ["e0#0", "e0#1"]


def test_whoever_waits_hears_of_room(fleet, heard):
    before = heard.rooms
    fleet.mark_up(fleet.engine("e0"), CARDS, now=1.0)
    assert heard.rooms == before, "nothing has changed"
    fleet.mark_up(fleet.engine("e0"), [{"id": "m"}, {"id": "l", "parent": "m"}], now=1.0)
    assert heard.rooms == before + 1
    assert fleet.is_adapter("l")


def test_an_adapter_is_no_second_model_for_those_who_name_none(fleet):
    fleet.mark_up(fleet.engine("e0"), [{"id": "m"}, {"id": "lora", "parent": "m"}], now=1.0)
    assert fleet.models() == ["m"]
    assert names(fleet.serving("lora")) == ["e0"]
