"""Who pays for a value, and who has more than a quota."""

from __future__ import annotations

from kvhearth.store.dram.payers import Payers
from kvhearth.store.dram.rules import Rules


def test_a_value_is_paid_for_by_its_namespace_and_its_group_until_it_is_gone() -> None:
    payers = Payers(Rules(), 8)
    payers.settle(0, payers.charge(b"a:1", 7, 100))
    payers.settle(1, payers.charge(b"a:2", 0, 50))
    assert payers.by_namespace() == {"a": (150, 2)}
    assert payers.by_group() == {"00000007": (100, 1), "00000000": (50, 1)}
    payers.remove(0, 100)
    assert payers.by_group() == {"00000000": (50, 1)}
    payers.refund(payers.charge(b"b:1", 9, 10), 10)
    assert payers.by_namespace() == {"a": (50, 1)}


def test_an_excess_names_the_slots_of_the_one_who_is_over() -> None:
    payers = Payers(Rules(namespace_quota_bytes=100), 8)
    for slot, key in enumerate((b"a:1", b"b:1", b"a:2")):
        payers.settle(slot, payers.charge(key, 0, 40))
    payer = payers.charge(b"a:3", 0, 40)
    (excess,) = payers.excesses(payer, 40, 3)
    assert excess.slots.tolist() == [0, 2]
    assert excess.is_over
    assert not excess.is_within_quota
    payers.remove(0, 40)
    assert excess.is_within_quota


def test_a_value_larger_than_a_quota_costs_nobody_anything() -> None:
    payers = Payers(Rules(quotas={5: 10}), 8)
    payers.settle(0, payers.charge(b"k", 5, 10))
    (excess,) = payers.excesses(payers.charge(b"k2", 5, 11), 11, 1)
    assert excess.slots.tolist() == []
