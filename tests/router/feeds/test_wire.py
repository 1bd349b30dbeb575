"""vLLM's events in the index's terms."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest

from kvhearth.router.feeds.wire import apply, decode, short_hash
from kvhearth.routing.index import KvIndex

from .conftest import BLOCK, keys_of, removed, stored


def tell(index: KvIndex, *events: dict[str, Any], whole: bool = False) -> list[str]:
    batch = decode(msgspec.msgpack.encode([1.5, list(events), 0]))
    return [apply(event, "e", index, whole=whole) for event in batch.events]


def test_hashes_are_the_last_eight_bytes() -> None:
    assert short_hash(bytes(24) + (77).to_bytes(8, "big")) == 77
    assert short_hash(77) == 77


def test_whole_hashes_and_cut_ones_are_the_same_blocks(index: KvIndex) -> None:
    tell(index, stored([bytes(24) + (number).to_bytes(8, "big") for number in (1, 2)]))  # type: ignore[misc]
    tell(index, removed([2]))
    assert index.match(keys_of(2), ["e"])[0].hbm == 1


def test_salt_and_lora_of_the_first_block_hold_for_all_after_it(index: KvIndex) -> None:
    salted = stored([1, 2], extra_keys=[["tenant"], None])
    adapted = stored([11, 12], lora_name="sql", lora_id=1, extra_keys=[["sql"], ["sql"]])
    tell(index, salted, stored([3], 2, first=2 * BLOCK), adapted)
    assert index.match(keys_of(3, salt="tenant"), ["e"])[0].hbm == 3
    assert index.match(keys_of(2, lora="sql"), ["e"])[0].hbm == 2
    assert index.match(keys_of(3), ["e"])[0].hbm == 0


def test_a_described_chunk_in_dram_keeps_the_salt_that_its_event_does_not_name(index: KvIndex) -> None:
    tell(index, stored([1, 2], extra_keys=[["tenant"], None]), stored([1, 2], medium="CPU"), removed([1, 2]))
    assert index.match(keys_of(2, salt="tenant"), ["e"])[0].dram == 2
    assert index.match(keys_of(2), ["e"])[0].dram == 0


def test_a_chunk_of_several_blocks_counts_whole_or_not_at_all(index: KvIndex) -> None:
    tell(index, stored([1, 2, 3]), stored([1, 2], medium="CPU"), removed([1, 2, 3]))
    assert index.match(keys_of(2), ["e"])[0].dram == 2
    assert index.match(keys_of(1), ["e"])[0].dram == 0


def test_a_snapshot_names_salts_itself(index: KvIndex) -> None:
    tell(index, stored([1, 2], medium="CPU", extra_keys=[["tenant"], None]), whole=True)
    assert index.match(keys_of(2, salt="tenant"), ["e"])[0].dram == 2


def test_an_unknown_medium_is_worth_nothing(index: KvIndex) -> None:
    assert tell(index, stored([1], medium="TAPE"), removed([1], "TAPE")) == ["unknown_medium"] * 2
    assert index.match(keys_of(1), ["e"])[0] == (0, 0, 0)


@pytest.mark.parametrize("payload", [b"", b"\x01", b"\xc1", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_batch_is_an_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="KV events"):
        decode(payload)


def test_one_bad_event_does_not_spoil_a_batch() -> None:
    batch = decode(msgspec.msgpack.encode([1.5, [{"type": "New"}, stored([1]), {"no": "type"}, removed([2])], 3]))
    assert (len(batch.events), batch.unread, batch.at) == (2, 2, 1.5)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_of_no_time_is_none_for_no_later_start_could_be_told_from_it(time: float) -> None:
    with pytest.raises(ValueError, match="its time"):
        decode(msgspec.msgpack.encode([time, [stored([1])], 0]))


def test_a_batch_nested_without_end_is_none() -> None:
    with pytest.raises(ValueError, match="KV events"):
        decode(b"\x92\xcb" + struct.pack(">d", 1.5) + b"\x91" * 3000)


def test_extra_keys_without_a_form_of_their_own_leave_the_block_out(index: KvIndex) -> None:
    tell(index, stored([1], extra_keys=[[{1: "a", "b": 2}]]), stored([2]))
    assert index.ignored["malformed"] == 1
    assert index.match(keys_of(1), ["e"])[0].hbm == 1
