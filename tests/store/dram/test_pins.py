"""Pins: bounded in pages and number, ended by time, and never counted twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.dram.pins import Pins

steps = st.lists(st.tuples(st.sampled_from(["add", "drop", "wait"]), st.integers(0, 6), st.integers(1, 4)), max_size=60)


@given(steps)
def test_pages_are_those_of_what_is_pinned_and_bounds_hold(given_steps: list[tuple[str, int, int]]) -> None:
    pins, now = Pins(max_pages=10, max_items=4), 0.0
    held: dict[int, float] = {}
    for what, slot, number in given_steps:
        if what == "add":
            wanted = {slot: slot + 1, (slot + number) % 7: (slot + number) % 7 + 1}
            held = {each: until for each, until in held.items() if until > now}
            together = {**dict.fromkeys(held, 0.0), **dict.fromkeys(wanted, 0.0)}
            fits = sum(each + 1 for each in together) <= 10 and len(together) <= 4
            assert pins.add(wanted, now + number, now) == fits
            if fits:
                held.update({each: max(now + number, held.get(each, 0.0)) for each in wanted})
        elif what == "drop":
            assert pins.drop(slot) == (slot in held)
            held.pop(slot, None)
        else:
            now += number
            for each in list(held):
                assert pins.holds(each, now) == (held[each] > now)
                if held[each] <= now:
                    del held[each]
        assert pins.pages == sum(each + 1 for each in held)
        assert all(each in pins and pins.until(each) == until for each, until in held.items())
