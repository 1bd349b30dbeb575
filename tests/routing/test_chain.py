"""Own keys name KV by what it depends on, and by nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.routing.chain import KEY_MASK, block_keys, chain_seed, split_extra_keys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def common(left: list[int], right: list[int]) -> int:
    return next(
        (at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other),
        min(len(left), len(right)),
    )


@given(left=tokens, right=tokens, shared=tokens, block_tokens=st.integers(1, 5))
def test_keys_agree_exactly_as_far_as_whole_blocks_of_tokens_do(left, right, shared, block_tokens):
    a, b = shared + left, shared + right
    whole = min(len(a), len(b)) // block_tokens
    assert common(block_keys(a, block_tokens, 1), block_keys(b, block_tokens, 1)) == min(
        common(a, b) // block_tokens, whole
    )


@given(ids=tokens, block_tokens=st.integers(1, 5))
def test_there_is_a_key_for_every_full_block_and_it_is_small(ids, block_tokens):
    keys = block_keys(ids, block_tokens, chain_seed())
    assert len(keys) == len(ids) // block_tokens
    assert all(0 < key <= KEY_MASK for key in keys)


@given(ids=tokens, cut=st.integers(0, 10))
def test_a_chain_goes_on_from_the_key_of_its_parent(ids, cut):
    keys = block_keys(ids, 2, chain_seed("a"))
    cut = min(cut, len(keys))
    if cut:
        assert block_keys(ids[2 * cut :], 2, keys[cut - 1]) == keys[cut:]


def test_loras_and_salts_share_no_keys():
    seeds = [chain_seed(*names) for names in [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab")]]
    chains = [tuple(block_keys([1, 2, 3, 4], 2, seed)) for seed in seeds]
    assert len({key for chain in chains for key in chain}) == 2 * len(seeds)


def test_an_image_in_a_block_changes_its_key_and_those_after():
    plain = block_keys(range(8), 2, 1)
    image = block_keys(range(8), 2, 1, [None, [("hash", 3)], None, None])
    assert common(plain, image) == 1
    assert not set(plain[1:]) & set(image)


def test_extra_keys_mean_the_same_as_tuples_or_as_decoded_lists():
    as_tuples = block_keys(range(4), 2, 1, [(("hash", 3), b"\x00\xff"), None])
    assert as_tuples == block_keys(range(4), 2, 1, [[["hash", 3], b"\x00\xff"], None])
    assert as_tuples != block_keys(range(4), 2, 1, [[["hash", 3], b"\x00\xfe"], None])


def test_a_long_prompt_is_keyed_up_to_the_bound():
    assert block_keys(range(100), 2, 1, max_blocks=7) == block_keys(range(100), 2, 1)[:7]


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "1", None])
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(ValueError, match="token ids"):
        block_keys([1, bad], 2, 1)


def test_extra_keys_of_an_event_are_taken_apart():
    event = [["adapter", ["image", 4], "tenant"], ["adapter", b"digest"], ["adapter"], None]
    assert split_extra_keys(event, "adapter") == ("tenant", [[["image", 4]], [b"digest"], None, None])
    assert split_extra_keys([["tenant"], None]) == ("tenant", None)
    assert split_extra_keys([["adapter", "adapter"]], "adapter") == ("adapter", None)
    assert split_extra_keys(None) == ("", None)


@pytest.mark.parametrize("extra", [{1: "a", "b": 2}, {b"a": 1}])
def test_extra_keys_without_a_form_of_their_own_are_an_error(extra):
    with pytest.raises(ValueError, match="extra keys"):
        block_keys([1, 2], 2, 1, [[extra]])
