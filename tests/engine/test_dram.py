"""The DRAM tier keeps what was used last, never what is busy, and never more than it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.engine.dram import DramTier


class Reference:
    """LRU in ten lines: keys in order of use, and the busy ones among them (readers, or -1 while written)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.order, self.busy = capacity, list[int](), dict[int, int]()

    def reserve(self, keys: list[int], protect: set[int]) -> bool:
        idle = [k for k in self.order if k not in self.busy and k not in protect]
        missing = max(0, len(self.order) + len(keys) - self.capacity)
        if missing > len(idle):
            return False
        self.order = [k for k in self.order if k not in idle[:missing]] + keys
        self.busy.update(dict.fromkeys(keys, -1))
        return True


KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=5, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.data())
def test_behaves_as_the_reference_does(capacity: int, data: st.DataObject) -> None:
    tier, want = DramTier(capacity), Reference(capacity)
    writes: list[list[int]] = []
    reads: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(("write", "written", "read", "unread", "touch")))
        if action == "write":
            keys = [k for k in data.draw(KEYS) if k not in want.order]
            protect = set(data.draw(st.lists(st.integers(0, 11), max_size=3)))
            fits = tier.reserve(keys, protect)
            assert fits == want.reserve(keys, protect)
            if fits:
                writes.append(keys)
        elif action == "written" and writes:
            keys = writes.pop(data.draw(st.integers(0, len(writes) - 1)))
            ok = data.draw(st.integers(0, len(keys)))
            tier.written(keys[:ok])
            tier.lost(keys[ok:])
            for key in keys:
                del want.busy[key]
            want.order = [k for k in want.order if k not in keys[ok:]]
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
        tier.check_integrity()
        assert len(tier) == len(want.order) <= capacity
        for key in range(12):
            assert tier.ready(key) == (want.busy.get(key, 0) >= 0 if key in want.order else None)
    assert tier.clear() == (not want.busy)


def test_when_everything_is_in_flight_nothing_more_fits_and_nobody_waits() -> None:
    tier = DramTier(2)
    assert tier.reserve([1, 2], [])
    assert not tier.reserve([3], [])
    tier.written([1, 2])
    tier.pin([1])
    assert not tier.reserve([3, 4], [])  # half of it would fit: all or nothing
    assert tier.ready(2)
    assert tier.reserve([3], [])
    assert tier.ready(1)
    assert tier.ready(2) is None
