"""How many requests an engine may have: as many as it took before it began to queue, and few while it is cold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.router.capacity import Capacity

MOST = 100


def test_an_engine_that_reports_nothing_is_bounded_by_the_limit_alone():
    capacity = Capacity(MOST)
    capacity.reported(500, 0, 8, MOST)
    assert capacity.most == MOST


def test_one_that_reports_a_queue_is_full_with_what_it_had_without_the_surplus():
    capacity = Capacity(MOST)
    capacity.reported(40, 18, 8, MOST)
    assert capacity.most == 30


def test_room_that_it_reports_later_raises_that():
    capacity = Capacity(MOST)
    capacity.reported(40, 18, 8, MOST)
    capacity.reported(30, 2, 8, MOST)
    assert capacity.most == 36


def test_without_pressure_it_is_forgotten():
    capacity = Capacity(MOST)
    capacity.reported(40, 18, 8, MOST)
    capacity.reported(3, 0, 8, MOST)
    assert (capacity.most, capacity.learned) == (MOST, 0)


def test_no_backlog_asked_for_means_no_bound_learned():
    capacity = Capacity(MOST)
    capacity.reported(40, 18, 0, MOST)
    assert capacity.most == MOST


def test_a_cold_engine_gets_a_growing_part_of_what_the_warm_ones_have():
    capacity, seen = Capacity(MOST), []
    for share in (0.0, 0.25, 0.5, 1.0):
        capacity.warming(share, 40.0, MOST)
        seen.append(capacity.most)
    assert seen == [5, 11, 21, MOST]


def test_on_trial_it_gets_one_request_at_a_time():
    capacity = Capacity(MOST)
    capacity.on_trial(MOST, on_trial=True)
    assert capacity.most == 1
    capacity.on_trial(MOST, on_trial=False)
    assert capacity.most == MOST


@given(st.integers(1, 200), st.integers(1, 50))
def test_an_engine_that_runs_a_fixed_number_at_once_settles_with_its_backlog_full(runs, backlog):
    """Endless demand: what is let in fills the engine and its backlog, whatever the first overshoot."""
    most = 1000
    capacity, in_flight = Capacity(most), 0
    for _ in range(60):
        in_flight = max(min(in_flight, capacity.most), capacity.most)
        capacity.reported(in_flight, max(0, in_flight - runs), backlog, most)
    assert capacity.most == runs + backlog
