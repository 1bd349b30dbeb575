"""Ends of slots."""

from __future__ import annotations

import math

from kvhearth.store.dram.lives import Lives


def test_what_has_an_end_is_over_at_it_and_what_has_none_never() -> None:
    lives = Lives(10)
    assert not lives.any
    lives.set(3, 5.0)
    lives.set(4, math.inf)
    lives.set(5, 7.0)
    assert (lives.end(3), lives.end(4), lives.has_end(4)) == (5.0, math.inf, False)
    assert not lives.is_over(3, 4.9)
    assert lives.is_over(3, 5.0)
    assert lives.over(10, 6.0) == [3]
    assert lives.over(5, 100.0) == [3]
    assert not lives.is_over(4, 1e12)


def test_nobody_has_to_look_once_the_last_end_is_taken_away() -> None:
    lives = Lives(4)
    lives.set(0, 1.0)
    lives.set(0, 2.0)
    assert lives.any
    lives.set(0, math.inf)
    assert not lives.any
    assert lives.over(4, 100.0) == []
