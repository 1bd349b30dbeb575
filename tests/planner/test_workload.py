"""Segments name text: equal names are equal text, and the chains compare text without making it."""

from hypothesis import example, given
from hypothesis import strategies as st

from kvhearth.engine.tokens import block_hashes, decode, encode, output_tokens, prompt_seed
from kvhearth.planner.workload import (
    WORD_BYTES,
    Segment,
    Turn,
    User,
    Workload,
    content_chain,
    output_segment,
    prompt_of,
)

segments = st.lists(st.builds(Segment, st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=5).map(tuple)


def text(of: tuple[Segment, ...]) -> str:
    return "".join(segment.text() for segment in of)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.integers(0, 2**64 - 1), st.integers(1, 50), st.integers(1, 50))
def test_a_longer_segment_starts_with_the_shorter_one(seed: int, a: int, b: int) -> None:
    short, long = sorted((Segment(seed, a).text(), Segment(seed, b).text()), key=len)
    assert long.startswith(short)


@given(segments)
def test_a_word_is_one_token_of_the_emulated_engine(prompt: tuple[Segment, ...]) -> None:
    assert len(encode(text(prompt))) == sum(s.tokens for s in prompt)
    assert len(text(prompt)) == WORD_BYTES * sum(s.tokens for s in prompt)


@given(segments, segments, st.sampled_from([1, 4, 16]))
def test_chain_over_names_agrees_exactly_where_the_engines_hashes_do(
    a: tuple[Segment, ...], b: tuple[Segment, ...], block: int
) -> None:
    by_name = common(content_chain(a, block), content_chain(b, block))
    by_token = common(block_hashes(encode(text(a)), block), block_hashes(encode(text(b)), block))
    assert by_name == by_token
    assert len(content_chain(a, block)) == len(encode(text(a))) // block


@given(segments, segments, st.sampled_from([WORD_BYTES, 6 * WORD_BYTES, 32]))
@example((Segment(0, 19), Segment(0, 1)), (Segment(0, 20),), 32)
def test_chain_over_names_agrees_exactly_where_the_text_does(
    a: tuple[Segment, ...], b: tuple[Segment, ...], unit: int
) -> None:
    left, right = text(a), text(b)
    shared = 0
    while (shared + 1) * unit <= min(len(left), len(right)) and left[: (shared + 1) * unit] == right[
        : (shared + 1) * unit
    ]:
        shared += 1
    by_name = common(content_chain(a, unit, WORD_BYTES), content_chain(b, unit, WORD_BYTES))
    if unit % WORD_BYTES:  # a unit ends within a word: two different words may begin alike, which names do not see
        assert by_name <= shared
    else:
        assert by_name == shared


def test_generated_text_is_a_function_of_the_prompt_and_comes_back_as_the_same_tokens() -> None:
    prompt, other = (Segment(1, 20),), (Segment(2, 20),)
    assert output_segment(prompt, 5) == output_segment(prompt, 5)
    assert output_segment(prompt, 5).seed != output_segment(other, 5).seed
    answer = decode(output_tokens(prompt_seed(encode(text(prompt))), 5))
    assert encode(text(prompt) + answer)[20:] == encode(answer)


def test_a_conversation_carries_its_history() -> None:
    first, second = Turn((Segment(1, 10),), 4), Turn((Segment(2, 6),), 3, continues=True)
    workload = Workload("w", (User("u", "t", 0, (first, second)),))
    (_, _), (prompt, _) = workload.prompts()
    assert prompt == (Segment(1, 10), output_segment((Segment(1, 10),), 4), Segment(2, 6))
    assert prompt_of(prompt, first) == first.segments
    assert workload.requests == 2
    assert workload.longest_tokens == 10 + 4 + 6 + 3


def test_fewer_users_are_drawn_from_all_and_keep_their_order() -> None:
    users = tuple(User(f"u{i}", "t", i, (Turn((Segment(i, 3),), 1),)) for i in range(100))
    workload = Workload("w", users)
    drawn = [user.start_ns for user in workload.with_users(20).users]
    assert len(drawn) == 20
    assert drawn == sorted(drawn)
    assert drawn[-1] > 50
    assert workload.with_users(20) == workload.with_users(20)
    assert workload.with_users(100).users == users
