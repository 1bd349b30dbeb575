"""The last fingerprints that went, and no more of them than asked for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.policies.ghost import Ghost


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.tuples(st.booleans(), st.integers(1, 12), st.integers(1, 9)), max_size=60))
def test_it_is_a_list_cut_at_its_end(capacity: int, events: list[tuple[bool, int, int]]) -> None:
    ghost, model = Ghost(capacity), list[int | None]()
    for add, fingerprint, at_most in events:
        if add:
            ghost.add(fingerprint, at_most)
            model = [None if known == fingerprint else known for known in model] + [fingerprint]
            model = model[-min(at_most, capacity) :]
        else:
            assert ghost.take(fingerprint) == (fingerprint in model)
            model = [None if known == fingerprint else known for known in model]
