"""The DRAM tier keeps what was used last, never what is busy, and never more than it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.engine.dram import DramTier, Lead


class Reference:
    """LRU in ten lines: keys in order of use, and the busy ones among them (readers, or -1 while written)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.order, self.busy = capacity, list[int](), dict[int, int]()

    def reserve(self, keys: list[int], protect: set[int]) -> list[int]:
        for key in [k for k in self.order if k not in self.busy and k not in protect]:
            if len(self.order) + len(keys) > self.capacity:
                self.order.remove(key)
        taken = keys[: self.capacity - len(self.order)]
        self.order += taken
        self.busy.update(dict.fromkeys(taken, -1))
        return taken


KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_behaves_as_the_reference_does(capacity: int, data: st.DataObject) -> None:
    tier, want = DramTier(capacity), Reference(capacity)
    writes: list[list[int]] = []
    reads: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(("write", "written", "read", "unread", "touch", "drop")))
        if action == "write":
            keys = [k for k in data.draw(KEYS) if k not in want.order]
            protect = set(data.draw(st.lists(st.integers(0, 11), max_size=3)))
            fit = tier.reserve(keys, protect)
            assert keys[:fit] == want.reserve(keys, protect)
            if fit:
                writes.append(keys[:fit])
        elif action == "written" and writes:
            keys = writes.pop(data.draw(st.integers(0, len(writes) - 1)))
            ok = data.draw(st.integers(0, len(keys)))
            tier.written(keys, ok)
            for i, key in enumerate(keys):
                del want.busy[key]
                if i >= ok:
                    want.order.remove(key)
        elif action == "read":
            keys = [k for k in data.draw(KEYS) if k in want.order and want.busy.get(k, 0) >= 0]
            tier.pin(keys)
            for key in keys:
                want.busy[key] = want.busy.get(key, 0) + 1
            reads.append(keys)
        elif action == "unread" and reads:
            keys = reads.pop(data.draw(st.integers(0, len(reads) - 1)))
            tier.unpin(keys)
            for key in keys:
                want.busy[key] -= 1
                if not want.busy[key]:
                    del want.busy[key]
        elif action == "touch":
            keys = data.draw(KEYS)
            tier.touch(keys)
            for key in [k for k in keys if k in want.order]:
                want.order.remove(key)
                want.order.append(key)
        elif action == "drop":
            keys = data.draw(KEYS)
            tier.drop(keys)
            want.order = [k for k in want.order if k not in keys or k in want.busy]
        tier.check_integrity()
        assert len(tier) == len(want.order) <= capacity
        assert [k for k in range(12) if k in tier] == sorted(want.order)
        assert tier.room == capacity - len(want.busy)
        probe = data.draw(KEYS)
        lead = 0
        while lead < len(probe) and probe[lead] in want.order and want.busy.get(probe[lead], 0) >= 0:
            lead += 1
        pending = lead < len(probe) and want.busy.get(probe[lead]) == -1
        assert tier.lead(probe) == Lead(lead, pending)
    assert tier.clear() == (not want.busy)


def test_when_everything_is_in_flight_nothing_more_fits_and_nobody_waits() -> None:
    tier = DramTier(2)
    assert tier.reserve([1, 2], set()) == 2
    assert tier.reserve([3], set()) == 0
    tier.written([1, 2], 2)
    tier.pin([1])
    assert tier.reserve([3, 4], set()) == 1
    assert 1 in tier
    assert 2 not in tier
