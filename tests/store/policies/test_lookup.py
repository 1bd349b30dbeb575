"""A column's rows by fingerprint, as a dict has them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.store.policies.lookup import Lookup

# Few low bits, so that rows crowd together and wrap round the table's end.
fingerprints = st.integers(1, 2**64 - 1).map(lambda n: (n & ~15) | (n % 3) or 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(fingerprints, min_size=1, max_size=12, unique=True), st.data())
def test_it_finds_what_a_dict_finds(known: list[int], data: st.DataObject) -> None:
    column = np.array(known, np.uint64)
    lookup, model = Lookup(column), {}
    for row in data.draw(st.lists(st.integers(0, len(known) - 1), max_size=60)):
        if model.pop(known[row], None) is None:
            lookup.add(row)
            model[known[row]] = row
        else:
            lookup.remove(row)
        assert [lookup.find(fingerprint) for fingerprint in known] == [model.get(f, -1) for f in known]
