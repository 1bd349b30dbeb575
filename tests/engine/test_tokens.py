"""The emulated tokenizer gives back every text, keeps words apart, and names blocks by all that comes before them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.engine.tokens import (
    VOCAB_SIZE,
    StreamDecoder,
    block_hashes,
    decode,
    encode,
    output_tokens,
    prompt_seed,
)

TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200) | st.text(
    alphabet="ab \n\0é漢🔥", max_size=80
)
TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TEXT)
def test_decoding_gives_back_exactly_the_text(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token_id < VOCAB_SIZE for token_id in ids)


@given(TEXT, st.lists(st.integers(0, 200), max_size=6))
def test_a_stream_cut_anywhere_decodes_to_the_same_text(text: str, cuts: list[int]) -> None:
    ids = encode(text)
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    stream = StreamDecoder()
    pieces = [stream.feed(ids[start:end]) for start, end in pairwise(edges)]
    assert "".join(pieces) + stream.close() == text


@given(TEXT)
def test_a_streamed_piece_never_holds_half_a_character(text: str) -> None:
    stream = StreamDecoder()
    pieces = [stream.feed([token_id]) for token_id in encode(text)]
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


def test_half_a_character_at_the_end_of_a_stream_is_the_replacement_character() -> None:
    ids = encode("abcé漢")  # the é and the first byte of the other share a token
    stream = StreamDecoder()
    assert stream.feed(ids[:2]) == "abcé"
    assert stream.close() == "\ufffd"
    assert decode(ids[:2]) == "abcé\ufffd"


def test_a_word_of_four_letters_and_its_space_are_one_token() -> None:
    assert len(encode(" abcd efgh")) == 2
    assert encode("xyz abcd")[-1] == encode("longer text abcd")[-1]


def test_lone_surrogates_from_json_become_the_replacement_character() -> None:
    assert decode(encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("token_id", [0, 1, VOCAB_SIZE - 1, VOCAB_SIZE, (1 << 24) | 1])
def test_an_id_that_no_text_has_decodes_to_the_replacement_character(token_id: int) -> None:
    assert decode([token_id]) == "\ufffd"


@given(TOKENS, TOKENS, st.integers(1, 5), st.sampled_from(["", "tenant"]), st.sampled_from(["", "tenant"]))
def test_block_hashes_are_equal_exactly_when_salt_and_all_tokens_so_far_are(
    a: list[int], b: list[int], block_size: int, salt_a: str, salt_b: str
) -> None:
    hashes_a, hashes_b = block_hashes(a, block_size, salt_a), block_hashes(b, block_size, salt_b)
    assert len(hashes_a) == len(a) // block_size
    for i, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        end = (i + 1) * block_size
        assert (hash_a == hash_b) == (salt_a == salt_b and a[:end] == b[:end])
    assert all(0 <= value < 2**64 for value in hashes_a)


def test_block_hashes_stay_the_same_between_versions() -> None:
    """Engines of different versions share a store by them."""
    assert block_hashes(encode("the quick brown fox"), 3) == [8229998916069086852, 10256869569507324933]


@given(st.integers(0, 2**64 - 1), st.integers(0, 60))
def test_generated_text_comes_back_as_the_same_tokens(seed: int, n: int) -> None:
    output = output_tokens(seed, n)
    assert len(output) == n
    assert encode(decode(output)) == output
    assert encode("A:" + decode(output) + "\nQ:") == encode("A:") + output + encode("\nQ:")


@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.integers(0, 40))
def test_a_shorter_answer_is_the_beginning_of_a_longer_one(seed: int, short: int, more: int) -> None:
    assert output_tokens(seed, short + more)[:short] == output_tokens(seed, short)


def test_answers_follow_from_the_prompt() -> None:
    first, second = prompt_seed(encode("one prompt")), prompt_seed(encode("another prompt"))
    assert first != second
    assert output_tokens(first, 8) != output_tokens(second, 8)
    assert output_tokens(first, 8) == output_tokens(prompt_seed(encode("one prompt")), 8)
