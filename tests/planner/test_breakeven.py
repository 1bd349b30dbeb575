"""The break-even point is where a mode begins to pay and goes on paying."""

import pytest

from kvhearth.planner.breakeven import Level, break_even


def levels(*points: tuple[float, float]) -> list[Level]:
    return [Level(i, usage, {"native": gain}) for i, (usage, gain) in enumerate(points)]


def test_interpolated_between_the_last_that_does_not_pay_and_the_first_that_does() -> None:
    assert break_even(levels((0.2, 0.0), (0.6, 0.01), (0.8, 0.05)), "native", margin=0.03) == pytest.approx(0.7)


def test_never_paying_has_no_point() -> None:
    assert break_even(levels((0.2, 0.0), (0.9, 0.02)), "native", margin=0.03) is None


def test_always_paying_starts_at_the_lowest_level() -> None:
    assert break_even(levels((0.2, 0.1), (0.9, 0.2)), "native", margin=0.03) == 0.2


def test_a_gain_that_is_lost_again_does_not_count() -> None:
    assert break_even(levels((0.2, 0.1), (0.5, 0.0), (0.9, 0.06)), "native", margin=0.03) == pytest.approx(0.7)
