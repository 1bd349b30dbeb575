"""Equal hashes mean equal beginnings, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvhearth.routing.hashing import DEFAULT_MAX_PIECES, content_seed, estimate_tokens, prefix_hashes


@given(st.binary(max_size=200), st.binary(max_size=50), st.binary(max_size=50), st.integers(1, 16))
def test_hashes_agree_exactly_as_far_as_the_text_does_in_whole_pieces(shared, one, other, piece):
    left, right = shared + one, shared + other
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    hashes = [prefix_hashes(text, piece) for text in (left, right)]
    agree = next(
        (i for i, (a, b) in enumerate(zip(*hashes, strict=False)) if a != b), min(len(hashes[0]), len(hashes[1]))
    )
    assert agree == common // piece
    assert len(hashes[0]) == len(left) // piece
    assert all(0 <= value < 2**64 for value in hashes[0])


def test_a_piece_that_repeats_hashes_differently_at_each_place():
    assert len(set(prefix_hashes(b"x" * 2560))) == 10


def test_the_count_is_bounded():
    assert len(prefix_hashes(b"x" * 10_000_000)) == DEFAULT_MAX_PIECES
    assert prefix_hashes(b"x" * 1000, 10, max_pieces=3) == prefix_hashes(b"x" * 1000, 10)[:3]


def test_seeds_keep_models_and_salts_apart():
    seeds = [content_seed("m"), content_seed("n"), content_seed("m", "s"), content_seed("ms"), content_seed("m", "t")]
    assert len(set(seeds)) == 5
    assert len({prefix_hashes(b"x" * 256, seed=seed)[0] for seed in seeds}) == 5
    assert content_seed("m", "s") == content_seed("m", "s")


def test_hashes_are_the_same_in_every_process():
    assert prefix_hashes(b"a" * 512) == [4601359343016513779, 1536379779302940843]


def test_tokens_are_a_quarter_of_the_bytes_and_never_none():
    assert [estimate_tokens(n) for n in (0, 3, 4, 400, 401)] == [1, 1, 1, 100, 100]
