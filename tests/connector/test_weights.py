"""A model that was trained on, quantised or renamed is another model; telling so reads little of it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.connector.weights import digest_directory, digest_files

MIB = 2**20


def safetensors(path: Path, sizes: dict[str, int], fill: int = 1, **extra: Any) -> int:
    """Writes a file with tensors of these sizes in bytes; where their bytes begin."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}, **extra}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + bytes([fill]) * at)
    return 8 + len(text)


def change(path: Path, at: int) -> None:
    """Changes one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 1]))


SIZES = {"embed": 300_000, "norm": 64, "layer.0": 20_000, "layer.1": 12_289, "head": 300_000}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_one_changed_tensor_makes_other_weights(tmp_path: Path, name: str, place: str) -> None:
    file = tmp_path / "model.safetensors"
    base = safetensors(file, SIZES)
    before = digest_directory(tmp_path)
    start = base + sum(size for other, size in SIZES.items() if list(SIZES).index(other) < list(SIZES).index(name))
    change(file, start + {"start": 0, "middle": SIZES[name] // 2, "end": SIZES[name] - 1}[place])

    assert digest_directory(tmp_path) != before


@pytest.mark.parametrize("at", [1, 77_777, 299_999])
def test_one_changed_row_of_an_embedding_makes_other_weights(tmp_path: Path, at: int) -> None:
    """Untrained tokens are repaired row by row, far from where a tensor is sampled."""
    file = tmp_path / "model.safetensors"
    base = safetensors(file, {"model.embed_tokens.weight": 300_000, "layer": 64})
    before = digest_directory(tmp_path)
    change(file, base + at)

    assert digest_directory(tmp_path) != before


def test_equal_files_have_equal_digests_wherever_they_are(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        safetensors(folder / "model.safetensors", SIZES)

    first, second = (digest_directory(folder) for folder in folders)
    assert first == second
    assert first is not None
    assert len(first) == 32


def test_a_renamed_an_added_and_a_removed_file_make_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "model-1.safetensors"
    safetensors(file, SIZES)
    digests = [digest_directory(tmp_path)]
    file = file.rename(tmp_path / "model-2.safetensors")
    digests.append(digest_directory(tmp_path))
    (tmp_path / "extra.bin").write_bytes(b"\0" * 16)
    digests.append(digest_directory(tmp_path))
    file.unlink()
    digests.append(digest_directory(tmp_path))

    assert len(set(digests)) == 4


def test_what_is_no_weight_file_does_not_count(tmp_path: Path) -> None:
    assert digest_directory(tmp_path) is None
    (tmp_path / "README.md").write_text("hello")
    (tmp_path / "folder.safetensors").mkdir()
    assert digest_directory(tmp_path) is None
    assert digest_directory(tmp_path / "absent") is None


def test_a_changed_name_of_a_tensor_makes_other_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file, {"wq": 5000, "wk": 5000})
    before = digest_directory(tmp_path)
    safetensors(file, {"wk": 5000, "wq": 5000})

    assert digest_directory(tmp_path) != before


@pytest.mark.parametrize("digits", [40, 64])
def test_a_file_of_a_cache_that_names_by_content_is_known_by_that_name(tmp_path: Path, digits: int) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    model.mkdir()
    blob = blobs / ("ab" * (digits // 2))
    blob.write_bytes(b"one")
    link = model / "model.safetensors"
    link.symlink_to(blob)
    before = digest_directory(model)
    blob.write_bytes(b"two")  # never happens in such a cache; shows that the content is not read

    assert digest_directory(model) == before
    other = blobs / ("cd" * (digits // 2))
    other.write_bytes(b"two")
    link.unlink()
    link.symlink_to(other)
    assert digest_directory(model) != before


def test_a_link_to_a_file_of_any_other_name_is_read(tmp_path: Path) -> None:
    target, model = tmp_path / "weights-v1", tmp_path / "model"
    model.mkdir()
    target.write_bytes(b"one")
    (model / "model.safetensors").symlink_to(target)
    before = digest_directory(model)
    target.write_bytes(b"two")

    assert digest_directory(model) != before


def test_a_plain_file_whose_name_is_digits_is_read(tmp_path: Path) -> None:
    file = tmp_path / ("ab" * 20 + ".bin")
    file.write_bytes(b"one")
    before = digest_files([file])
    file.write_bytes(b"two")

    assert digest_files([file]) != before


def header_of(value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\0" * 8,
        b"\xff" * 8,
        struct.pack("<Q", 2**63) + b"x" * 100,
        struct.pack("<Q", 50) + b"{}",
        header_of(b"not json"),
        header_of(b"\xff\xfe"),
        header_of([]),
        header_of(7),
        header_of({"t": []}),
        header_of({"t": {}}),
        header_of({"t": {"data_offsets": None}}),
        header_of({}),
    ],
)
def test_a_truncated_or_foreign_header_is_sampled_like_any_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    before = digest_directory(tmp_path)
    file.write_bytes(content + b"x")

    assert before is not None
    assert digest_directory(tmp_path) != before


@pytest.mark.parametrize(
    "offsets",
    [["a", "b"], [0], [0, 1, 2], [None, None], [-100, 10], [5, 2], [0.5, 3], 7, "ab", {"a": 1}, [0, 2**70], [[], []]],
)
def test_offsets_that_make_no_sense_are_no_reason_to_fail(tmp_path: Path, offsets: Any) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(header_of({"t": {"data_offsets": offsets}}) + b"\1" * 64)
    before = digest_directory(tmp_path)
    change(file, file.stat().st_size - 1)

    assert before is not None
    assert digest_directory(tmp_path) != before


def test_a_header_nested_too_deep_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_of(b'{"t":' + b"[" * 200_000) + b"\1" * 64)

    assert digest_directory(tmp_path) is not None


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3 * MIB), st.randoms(use_true_random=False))
def test_a_file_of_another_kind_is_read_whole_when_small_and_all_over_when_large(
    tmp_path_factory: pytest.TempPathFactory, size: int, random: Any
) -> None:
    file = tmp_path_factory.mktemp("weights") / "model.bin"
    file.write_bytes(b"\1" * size)
    before = digest_files([file])
    changed = bytearray(b"\1" * size)
    stretch = 1 if size <= MIB else size // 128  # training changes more than a byte
    if size:
        at = random.randrange(max(1, size - stretch))
        changed[at : at + stretch] = b"\2" * min(stretch, size - at)
    file.write_bytes(changed)

    assert (digest_files([file]) == before) == (not size)


def bytes_read(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """How much `digest_directory` reads."""
    opened = Path.open
    read = 0

    class Counting:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def read(self, *size: int) -> bytes:
            nonlocal read
            data: bytes = self._file.read(*size)
            read += len(data)
            return data

    monkeypatch.setattr(Path, "open", lambda self, *args, **more: Counting(opened(self, *args, **more)))
    assert digest_directory(folder) is not None
    monkeypatch.undo()
    return read


def test_a_large_model_is_told_by_a_small_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = safetensors(tmp_path / "model.safetensors", {})
    sizes = {f"layer.{number}": 8 * MIB for number in range(8)}
    header: dict[str, Any] = {}
    at = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    base = 8 + len(text)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(base + at)  # sparse: takes no disk
    with (tmp_path / "model.bin").open("wb") as file:
        file.truncate(64 * MIB)

    assert bytes_read(monkeypatch, tmp_path) <= 2 * base + 8 * 3 * 4096 + 256 * 4096


def test_a_span_that_ends_before_it_begins_does_not_make_it_read_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(header_of({"t": {"data_offsets": [3, 2]}}))
    os.truncate(file, 16 * MIB)

    assert bytes_read(monkeypatch, tmp_path) <= 2 * MIB
