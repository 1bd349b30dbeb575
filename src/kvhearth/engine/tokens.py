"""The emulated models' tokenizer, reversible and without a vocabulary file, and the content hashes of blocks.

A token is an optional space or line feed and up to four letters, or up to three bytes of anything else. Its id, below
2**29 as whoever takes token ids expects, holds those bytes, so decoding needs no table. It is not any real model's
tokenizer: lengths come out near four bytes a token, words never share a token with their neighbours.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

VOCAB_SIZE = 1 << 29
"""Ids lie below this: whether it is a word, what leads it, how many characters follow, and those in 24 bits."""

WORD_BYTES = 5
"""Bytes (and characters) of one generated token: a space and four lowercase letters."""

_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"
_PAIRS = [bytes((first, second)) for first in _ALPHABET for second in _ALPHABET]
_PIECE = re.compile(rb"[ \n]?[A-Za-z0-9.,]{1,4}|[ \n]?[^ \nA-Za-z0-9.,]{1,3}|[ \n]")
_LEADS = (b"", b" ", b"\n")
_WORD = 1 << 28
_LEAD_SHIFT = 26
_COUNT_SHIFT = 24
_PAYLOAD = (1 << _COUNT_SHIFT) - 1
_WORD_LETTERS = 4
_REPLACEMENT = "\ufffd".encode()
_LETTERS = 26
_MASK_64 = (1 << 64) - 1
_NO_LETTER = 64
_CODE = np.full(256, _NO_LETTER, dtype=np.uint32)
_CODE[list(_ALPHABET)] = np.arange(64, dtype=np.uint32)
_LEAD = np.zeros(256, dtype=np.uint32)
_LEAD[[ord(" "), ord("\n")]] = (1, 2)


def encode(text: str) -> list[int]:
    """Token ids of a text. White space starts a new piece, so equal words after equal spaces are equal tokens.

    Unpaired surrogates (which JSON can carry and UTF-8 cannot) are encoded as U+FFFD.
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raw = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    pieces = _PIECE.findall(raw)
    if not pieces:
        return []
    lengths = np.fromiter(map(len, pieces), dtype=np.uint32, count=len(pieces))
    rows = np.array(pieces, dtype="S8").view(np.uint8).reshape(-1, 8)
    leads = _LEAD[rows[:, 0]]
    body = np.where((leads > 0)[:, None], rows[:, 1:5], rows[:, 0:4])
    counts = lengths - (leads > 0)
    codes = _CODE[body]
    words = (codes[:, 0] != _NO_LETTER) & (counts > 0)
    codes[np.arange(_WORD_LETTERS) >= counts[:, None]] = 0
    letters = codes[:, 0] << 18 | codes[:, 1] << 12 | codes[:, 2] << 6 | codes[:, 3]
    wide = body.astype(np.uint32)
    others = wide[:, 0] << 16 | wide[:, 1] << 8 | wide[:, 2]
    ids = leads << _LEAD_SHIFT | np.where(
        words, _WORD | (counts - 1) << _COUNT_SHIFT | letters, counts << _COUNT_SHIFT | others
    )
    result: list[int] = ids.tolist()
    return result


def token_bytes(token_id: int) -> bytes:
    """The bytes of one token; an id that `encode` never gives stands for U+FFFD."""
    lead, count, payload = token_id >> _LEAD_SHIFT & 3, token_id >> _COUNT_SHIFT & 3, token_id & _PAYLOAD
    if lead == len(_LEADS) or not 0 <= token_id < VOCAB_SIZE:
        return _REPLACEMENT
    if token_id & _WORD:
        rest = 6 * (3 - count)
        letters = (_PAIRS[payload >> 12] + _PAIRS[payload & 4095])[: count + 1]
    else:
        rest = 8 * (3 - count)
        letters = payload.to_bytes(3, "big")[:count]
    if payload & ((1 << rest) - 1) or not (lead or letters):
        return _REPLACEMENT
    return _LEADS[lead] + letters


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
    draws = _splitmix64(seed, n) % np.uint64(_LETTERS**_WORD_LETTERS)
    ids = np.full(n, _WORD | 1 << _LEAD_SHIFT | (_WORD_LETTERS - 1) << _COUNT_SHIFT, dtype=np.uint64)
    for position in range(_WORD_LETTERS):
        draws, letter = np.divmod(draws, np.uint64(_LETTERS))
        ids |= letter << np.uint64(6 * position)
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
