"""The emulated models' tokenizer, reversible and without a vocabulary file, and the content hashes of blocks.

A token is a piece of at most five UTF-8 bytes and its id holds those bytes, so decoding needs no table. It is not any
real model's tokenizer: lengths come out near four bytes a token, words never share a token with their neighbours.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

VOCAB_SIZE = 1 << 43
"""Ids lie below this: three bits of length above five bytes of text."""

WORD_BYTES = 5
"""Bytes (and characters) of one generated token: a space and four lowercase letters."""

_PIECE = re.compile(rb"[ \n]?[^ \n]{1,4}|[ \n]")
_LENGTH_SHIFT = 40
_REPLACEMENT = "\ufffd".encode()
_LETTERS = 26
_MASK_64 = (1 << 64) - 1


def encode(text: str) -> list[int]:
    """Token ids of a text. White space starts a new piece, so equal words after equal spaces are equal tokens.

    Unpaired surrogates (which JSON can carry and UTF-8 cannot) are encoded as U+FFFD.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    pieces = _PIECE.findall(raw)
    lengths = np.fromiter(map(len, pieces), dtype=np.uint64, count=len(pieces))
    left_aligned = np.array(pieces, dtype="S8").view(">u8").astype(np.uint64)
    ids: list[int] = (
        lengths << np.uint64(_LENGTH_SHIFT) | left_aligned >> (np.uint64(64) - np.uint64(8) * lengths)
    ).tolist()
    return ids


def token_bytes(token_id: int) -> bytes:
    """The bytes of one token; an id that `encode` never gives stands for U+FFFD."""
    length = token_id >> _LENGTH_SHIFT
    payload = token_id & ((1 << _LENGTH_SHIFT) - 1)
    if not 1 <= length <= WORD_BYTES or payload >> (8 * length):
        return _REPLACEMENT
    return payload.to_bytes(length, "big")


def decode(token_ids: Sequence[int]) -> str:
    """The text of token ids: exactly what `encode` was given. Bytes that are not UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes token by token: a character split over tokens comes out whole with the last of them.

    The pieces given by `feed` and `close`, joined, equal `decode` of all ids.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is complete after these further tokens."""
        return self._decoder.decode(b"".join(map(token_bytes, token_ids)))

    def close(self) -> str:
        """What is left at the end of the stream: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", True)


def block_hashes(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Chained hashes of the full blocks: equal hash = equal salt and equal tokens from the start up to there.

    Args:
        token_ids: n ids, each in [0, 2**64).
        block_size: tokens a block.
        salt: keeps otherwise equal prefixes apart; it enters the first block's hash.

    Returns:
        ``n // block_size`` integers below 2**64.
    """
    raw = _id_bytes(token_ids)
    width = 8 * block_size
    digest = xxhash.xxh3_64_digest
    parent = digest(salt.encode("utf-8", "surrogatepass"))
    hashes = []
    for start in range(0, len(raw) - width + 1, width):
        parent = digest(parent + raw[start : start + width])
        hashes.append(int.from_bytes(parent, "big"))
    return hashes


def prompt_seed(token_ids: Sequence[int]) -> int:
    """Hash of a whole prompt, as the seed of what the emulated model answers; below 2**64."""
    return xxhash.xxh3_64_intdigest(_id_bytes(token_ids))


def output_tokens(seed: int, n: int) -> list[int]:
    """The ``n`` tokens that the emulated model answers to a prompt of this seed.

    Each is one word, a space and four lowercase letters, so that the text encodes to the same ids when it comes back
    as part of the next prompt. A shorter answer to the same seed is a prefix of a longer one.
    """
    draws = _splitmix64(seed, n) % np.uint64(_LETTERS**4)
    ids = np.full(n, WORD_BYTES << _LENGTH_SHIFT | ord(" ") << 32, dtype=np.uint64)
    for position in range(4):
        draws, letter = np.divmod(draws, np.uint64(_LETTERS))
        ids |= (letter + np.uint64(ord("a"))) << np.uint64(8 * position)
    result: list[int] = ids.tolist()
    return result


def _id_bytes(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, dtype="<u8").tobytes()


def _splitmix64(seed: int, n: int) -> npt.NDArray[np.uint64]:
    """``n`` draws of SplitMix64 (Steele, Lea, Flood 2014), which any position of the stream can be computed from."""
    state = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & _MASK_64)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
