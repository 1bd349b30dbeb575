"""Which weights these are: a digest of their files that tells a retrained model from the one before.

A file that a content-addressed cache holds is named by its hash. Other files are sampled: of each tensor in a
safetensors file its beginning, middle and end, of any other file evenly spaced pieces. Training that changes a tensor
changes these. Embeddings, of which single rows may change, are read whole: of
a 100 GB model some gigabytes, which have just been loaded.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import xxhash

_PIECE_BYTES = 4096
_SMALL_PIECE_BYTES = 256
_MANY_TENSORS = 4096
_PIECES = 256
_ROWS_APART = re.compile(r"embed|lm_head|wte|wpe")
_MOST_WHOLE_BYTES = 8 << 30
_READ_BYTES = 8 << 20
_LARGEST_HEADER_BYTES = 128 << 20
_CONTENT_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def digest_directory(path: Path, patterns: Iterable[str] = WEIGHT_FILES) -> str | None:
    """32 hex digits for the weight files of a directory, in all; None when it holds none."""
    files = sorted({file for pattern in patterns for file in path.glob(pattern) if file.is_file()})
    return digest_files(files) if files else None


def digest_files(files: Iterable[Path]) -> str:
    """32 hex digits for files by name and content (sampled, see above). Raises OSError."""
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(file.name.encode() + b"\0" + _identity(file) + b"\n")
    return digest.hexdigest()


def _identity(file: Path) -> bytes:
    target = os.path.basename(os.path.realpath(file))
    if file.is_symlink() and _CONTENT_NAME.fullmatch(target):
        return target.encode()
    size = file.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with file.open("rb") as source:
        for start, length in _pieces(file, source, size):
            source.seek(start)
            digest.update(source.read(length))
    return digest.hexdigest().encode()


def _pieces(file: Path, source: BinaryIO, size: int) -> list[tuple[int, int]]:
    if file.suffix == ".safetensors" and size > 8:
        (header_bytes,) = struct.unpack("<Q", source.read(8))
        if header_bytes <= min(size - 8, _LARGEST_HEADER_BYTES):
            base = 8 + header_bytes
            spans = _tensor_spans(source.read(header_bytes), size - base)
            if spans:
                length = _PIECE_BYTES if len(spans) <= _MANY_TENSORS else _SMALL_PIECE_BYTES
                return [(0, base), *(piece for span in spans for piece in _pieces_of_tensor(base, *span, length))]
    if size <= _PIECES * _PIECE_BYTES:
        return [(0, size)]
    step = (size - _PIECE_BYTES) // (_PIECES - 1)
    return [(i * step, _PIECE_BYTES) for i in range(_PIECES)]


def _tensor_spans(header: bytes, room: int) -> list[tuple[str, int, int]]:
    """A safetensors file's tensors and where they lie behind its header; empty when that makes no sense."""
    try:
        entries = [(name, entry) for name, entry in json.loads(header).items() if name != "__metadata__"]
        spans = [(name, start, end) for name, (start, end) in ((name, e["data_offsets"]) for name, e in entries)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    right = all(type(start) is int and type(end) is int and 0 <= start <= end <= room for _, start, end in spans)
    return spans if right else []


def _pieces_of_tensor(base: int, name: str, start: int, end: int, piece: int) -> list[tuple[int, int]]:
    start, end, length = base + start, base + end, end - start
    if _ROWS_APART.search(name) and length <= _MOST_WHOLE_BYTES:
        return [(at, min(_READ_BYTES, end - at)) for at in range(start, end, _READ_BYTES)]
    if length <= 3 * piece:
        return [(start, length)]
    return [(at, piece) for at in (start, start + (length - piece) // 2, end - piece)]
