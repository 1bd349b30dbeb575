"""Uses that are told late change nothing: the same slots go, in the same order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.policies import make_policy
from kvhearth.store.policies.facts import Facts
from kvhearth.store.policies.late import Late

SLOTS = 12
steps = st.lists(
    st.one_of(
        st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=5, unique=True), st.sampled_from(["evict", "remove"])
    ),
    max_size=60,
)


def facts() -> Facts:
    made = Facts(SLOTS)
    made.nbytes[:] = 1
    made.fingerprint[:] = np.random.default_rng(0).integers(1, 2**63, SLOTS, dtype=np.uint64)
    return made


@given(steps)
def test_what_goes_is_what_would_have_gone(given_steps: list[list[int] | str]) -> None:
    plain, late = make_policy("lru", facts(), 100), Late(make_policy("lru", facts(), 100))
    held: set[int] = set()
    for step in given_steps:
        if isinstance(step, list):
            for slot in (slot for slot in step if slot not in held):
                held.add(slot)
                plain.added(slot)
                late.added(slot)
            plain.touched(step)
            late.touched(step)
        elif held:
            going = plain.victim(lambda slot: True) if step == "evict" else min(held)
            assert step != "evict" or late.victim(lambda slot: True) == going
            assert going is not None
            held.discard(going)
            plain.removed(going, evicted=step == "evict")
            late.removed(going, evicted=step == "evict")


def test_no_more_than_a_batch_waits() -> None:
    seen: list[int] = []

    class Counting:
        def touched(self, slots: list[int]) -> None:
            seen.append(len(slots))

    late = Late(Counting())  # type: ignore[arg-type]
    for _ in range(10):
        late.touched(list(range(300)))
    assert sum(seen) >= 2400
    assert max(seen) < 2048
