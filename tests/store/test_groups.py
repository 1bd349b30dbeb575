"""What each sharing group has: exact for as many groups as are told apart, and never more names than that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.groups import MAX_GROUPS, GroupShares, Share


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 1000), st.booleans()), max_size=300))
def test_names_are_bounded_and_sums_are_exact(steps: list[tuple[int, int, bool]]) -> None:
    shares = GroupShares()
    held: list[tuple[int, int, int]] = []
    for group, nbytes, drop_one in steps:
        if drop_one and held:
            slot, size, _ = held.pop(nbytes % len(held))
            shares.remove(slot, size)
        else:
            held.append((shares.add(group, nbytes), nbytes, group))
    named = shares.by_name()
    other = named.pop("other", Share(0, 0))
    assert len(named) <= MAX_GROUPS
    assert sum(share.value_bytes for share in named.values()) + other.value_bytes == sum(n for _, n, _ in held)
    assert sum(share.values for share in named.values()) + other.values == len(held)
    for name, share in named.items():
        of_group = [n for slot, n, group in held if group == slot == int(name, 16)]
        assert share == (sum(of_group), len(of_group))


def test_the_sixty_fifth_group_is_counted_with_the_others_until_its_values_are_gone() -> None:
    shares = GroupShares()
    slots = [shares.add(group, 10) for group in range(MAX_GROUPS + 2)]
    assert shares.by_name()["other"] == (20, 2)
    assert shares.by_name()["0000003f"] == (10, 1)
    shares.remove(slots[0], 10)
    assert shares.by_name()["other"] == (20, 2)
    assert shares.add(0xFFFF_FFFF, 5) == 0xFFFF_FFFF
    for slot in slots[MAX_GROUPS:]:
        shares.remove(slot, 10)
    assert "other" not in shares.by_name()
    assert shares.by_name()["ffffffff"] == (5, 1)
