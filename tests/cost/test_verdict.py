"""The verdict is the least machinery that is not clearly slower."""

import pytest

from kvhearth.cost.verdict import MARGIN, choose


@pytest.mark.parametrize(
    ("native", "shared", "mode"),
    [
        (100.0, 100.0, "none"),
        (98.0, 97.0, "none"),
        (100 * (1 + MARGIN) - 0.1, 100.0, "none"),
        (120.0, 121.0, "native"),
        (120.0, 140.0, "shared"),
        (99.0, 110.0, "shared"),
        (104.0, 104.0, "native"),
    ],
)
def test_least_machinery_that_is_not_clearly_slower(native: float, shared: float, mode: str) -> None:
    assert choose({"none": 100.0, "native": native, "shared": shared}).mode == mode


def test_none_says_that_offloading_does_not_pay() -> None:
    verdict = choose({"none": 100.0, "native": 100.4, "shared": 99.0})
    assert "does not pay" in verdict.reason
    assert "native +0.4%" in verdict.reason


def test_a_mode_that_is_a_little_faster_and_not_chosen_is_explained() -> None:
    verdict = choose({"none": 100.0, "native": 118.9, "shared": 122.4})
    assert verdict.mode == "native"
    assert "native serves 18.9% more" in verdict.reason
    assert "shared +22.4%" in verdict.reason
    assert "must gain 3% on it" in verdict.reason
    assert "must gain" not in choose({"none": 100.0, "native": 118.9, "shared": 132.4}).reason


def test_gain_is_over_none() -> None:
    assert choose({"none": 100.0, "native": 110.0, "shared": 150.0}).gain == pytest.approx(0.5)
