"""What is worth a put: not what the store has, and with second sight not what only one request has needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.connector import admission as module
from kvhearth.connector.admission import StoreAdmission


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_is_new_is_put_and_what_the_store_has_is_not() -> None:
    admission = StoreAdmission(second_sight=False, clock=Clock())
    assert admission.reason_to_skip(b"a", "r") is None
    admission.has(b"a")

    assert admission.reason_to_skip(b"a", "r") == "present"
    assert admission.reason_to_skip(b"b", "r") is None
    assert admission.known == [b"a"]


def test_what_the_store_had_a_minute_ago_it_may_have_evicted() -> None:
    clock = Clock()
    admission = StoreAdmission(second_sight=False, clock=clock)
    admission.has(b"a")
    clock.now += module._KNOWN_SECONDS - 1
    assert admission.reason_to_skip(b"a", "r") == "present"
    clock.now += 1

    assert admission.reason_to_skip(b"a", "r") is None


def test_what_the_store_turned_out_to_lack_is_put() -> None:
    admission = StoreAdmission(second_sight=False, clock=Clock())
    admission.has(b"a")
    admission.lacks(b"a")
    admission.lacks(b"never known")

    assert admission.reason_to_skip(b"a", "r") is None


def test_with_second_sight_a_second_request_makes_it_worth_a_put() -> None:
    admission = StoreAdmission(second_sight=True, clock=Clock())
    assert admission.wants_whole_requests
    assert admission.reason_to_skip(b"a", "one") == "second_sight"
    assert admission.reason_to_skip(b"a", "one") == "second_sight"  # the same request again is no second

    assert admission.reason_to_skip(b"a", "two") is None
    assert admission.reason_to_skip(b"a", "three") is None


def test_after_a_drop_requests_offer_what_dram_holds_for_a_while() -> None:
    clock = Clock()
    admission = StoreAdmission(second_sight=False, clock=clock)
    assert not admission.wants_whole_requests
    admission.reoffer()
    assert admission.wants_whole_requests
    clock.now += module._REOFFER_SECONDS

    assert not admission.wants_whole_requests


def test_after_an_outage_nothing_is_taken_for_present() -> None:
    admission = StoreAdmission(second_sight=False, clock=Clock())
    admission.has(b"a")
    admission.doubt()

    assert admission.reason_to_skip(b"a", "r") is None
    assert admission.wants_whole_requests


def test_after_a_change_of_names_nothing_is_known_or_seen() -> None:
    admission = StoreAdmission(second_sight=True, clock=Clock())
    admission.has(b"a")
    admission.reason_to_skip(b"b", "one")
    admission.forget()

    assert admission.reason_to_skip(b"a", "two") == "second_sight"
    assert admission.reason_to_skip(b"b", "two") == "second_sight"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["has", "lacks", "ask"]), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_tables_are_bounded_and_forget_the_oldest(operations: list[tuple[str, int]], bound: int) -> None:
    """Against a list: what the store was last said to have, the latest ``bound`` of it."""
    most, module._MOST_KNOWN = module._MOST_KNOWN, bound
    try:
        admission, model = StoreAdmission(second_sight=False, clock=Clock()), []
        for what, number in operations:
            name = b"%d" % number
            if what == "ask":
                assert (admission.reason_to_skip(name, "r") == "present") == (name in model)
            else:
                model = [each for each in model if each != name]
                if what == "has":
                    model = [*model, name][-bound:]
                    admission.has(name)
                else:
                    admission.lacks(name)
        assert admission.known == model
    finally:
        module._MOST_KNOWN = most
