"""A file's name tells the index what it needs, for any key, and fits a file system."""

from __future__ import annotations

from pathlib import PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.protocol.header import Header
from kvhearth.store.tiers.names import LEAVES, Entry, entry_of, leaf_of, leaf_path, parse_name, path_of

KEYS = st.binary(min_size=1, max_size=512)
U32, U64, I63 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)


@given(st.builds(Entry, KEYS, U32, U32, U64, I63, U64))
def test_a_name_tells_its_entry_and_fits(entry: Entry) -> None:
    path = PurePosixPath(path_of(entry))
    told = parse_name(path.name)
    assert told is not None
    assert len(path.name) <= 255
    assert told in (entry, entry._replace(key=b""))
    assert told.key or len(entry.key) > 135  # only a key that is too long is left to the file
    assert str(path.parent) == leaf_path(leaf_of(entry.key))


@given(st.text(max_size=300))
def test_no_name_makes_the_index_stumble(name: str) -> None:
    entry = parse_name(name)
    if entry is not None and entry.key:
        assert entry.recompute_ns < 2**63


def test_a_row_brings_what_its_header_says_and_other_values_bring_zeros() -> None:
    row = b"row" * 100
    header = Header(position=7, parent=2**64 - 1, recompute_ns=2**64 - 1).sealed(b"k", row)
    packed = header.pack()
    views = [memoryview(packed[:10]), memoryview(packed[10:] + row)]
    assert entry_of(b"k", views, 1234) == Entry(b"k", 64 + len(row), 7, 2**64 - 1, 2**63 - 1, 1234)
    assert entry_of(b"k", [memoryview(b"plain")], 5) == Entry(b"k", 5, 0, 0, 0, 5)
    assert entry_of(b"k", [memoryview(b"x" * 100)], 5) == Entry(b"k", 100, 0, 0, 0, 5)


def test_every_folder_has_a_path_of_its_own() -> None:
    assert len({leaf_path(leaf) for leaf in range(LEAVES)}) == LEAVES
