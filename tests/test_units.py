"""Sizes mean what they say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("4Gi", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("1TiB", 2**40),
        (7, 7),
    ],
)
def test_a_size_is_read(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 bananas", "1iB", "1..5GiB", "1.5", "0.3KiB", "2000000TiB"])
def test_what_is_no_size_names_the_field_and_the_remedy(text: str) -> None:
    with pytest.raises(UserError, match=r"^capacity: .*; write bytes or a number with a unit"):
        parse_bytes(text, where="capacity")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2 * 2**30, "2 GiB"), (2**50, "1024 TiB")],
)
def test_a_size_is_written_for_a_reader(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1023), st.sampled_from([0, 10, 20, 30, 40]))
def test_a_round_size_survives_writing_and_reading(number: int, power: int) -> None:
    assert parse_bytes(format_bytes(number << power)) == number << power
