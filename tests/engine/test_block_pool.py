"""HBM blocks: what is free, what is cached, and what goes next."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.engine.block_pool import BlockPool


class Reference:
    """The rules in ten lines: a plain list in eviction order, a hash a block, references counted one by one."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.hash: dict[int, int] = {}
        self.refs = dict.fromkeys(self.free, 0)
        self.cached: dict[int, list[int]] = {}

    def allocate(self, count: int) -> list[int]:
        out, self.free = self.free[:count], self.free[count:]
        for block in out:
            self.refs[block] = 1
            if block in self.hash:
                self.cached[self.hash.pop(block)].remove(block)
        return out

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] -= 1
        idle = [b for b in blocks if self.refs[b] == 0]
        self.free = [b for b in idle if b not in self.hash] + self.free + [b for b in idle if b in self.hash]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 12), st.data())
def test_blocks_are_handed_out_hit_and_evicted_as_in_the_reference(num_blocks: int, data: st.DataObject) -> None:
    pool, want = BlockPool(num_blocks, enable_caching=True), Reference(num_blocks)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("allocate", "publish", "hit", "release")))
        if action == "allocate" and pool.num_free:
            count = data.draw(st.integers(1, pool.num_free))
            held.append(pool.allocate(count))
            assert held[-1] == want.allocate(count)
        elif action == "publish" and held:
            blocks = data.draw(st.sampled_from(held))
            hashes = [data.draw(st.integers(0, 5)) for _ in blocks]
            for i, (block, key) in enumerate(zip(blocks, hashes, strict=True)):
                if block not in want.hash:
                    pool.publish(blocks, hashes, i, i + 1)
                    want.hash[block] = key
                    want.cached.setdefault(key, []).append(block)
        elif action == "hit":
            keys = data.draw(st.lists(st.integers(0, 5), max_size=4, unique=True))
            hit = pool.longest_hit(keys, len(keys))
            leading = []
            for key in keys:
                if not want.cached.get(key):
                    break
                leading.append(want.cached[key][0])
            assert hit == leading
            assert pool.count_free(hit) == sum(want.refs[b] == 0 for b in hit)
            pool.take(hit)
            for block in hit:
                want.refs[block] += 1
            want.free = [b for b in want.free if b not in hit]
            held.append(hit)
        elif action == "release" and held:
            blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pool.release(reversed(blocks))
            want.release(blocks[::-1])
        pool.check_integrity(b for blocks in held for b in blocks)
        assert pool.num_free == len(want.free) == num_blocks - pool.num_used
    assert pool.allocate(pool.num_free) == want.free


def test_a_reset_forgets_everything_but_only_when_nothing_is_in_use() -> None:
    pool = BlockPool(4, enable_caching=True)
    blocks = pool.allocate(2)
    pool.publish(blocks, [10, 11], 0, 2)
    assert not pool.reset()
    assert pool.longest_hit([10, 11, 12], 3) == blocks
    pool.release(reversed(blocks))
    assert pool.longest_hit([10, 11, 12], 3) == blocks
    assert pool.reset()
    assert pool.longest_hit([10, 11, 12], 3) == []
    pool.check_integrity([])


def test_a_pool_without_caching_hits_nothing() -> None:
    pool = BlockPool(4, enable_caching=False)
    blocks: Any = pool.allocate(2)
    pool.publish(blocks, [10, 11], 0, 2)
    assert pool.longest_hit([10, 11], 2) == []
