"""Hashes of passwords, and the files that keep them."""

from __future__ import annotations

import hashlib
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.store.server.passwords import (
    MAX_PASSWORD_BYTES,
    Hash,
    decoy_hash,
    hash_password,
    parse_hash,
    read_password_file,
    set_line,
)


def test_a_password_matches_its_hash_and_no_other_does() -> None:
    hashed = hash_password(b"correct horse")
    assert hashed.matches(b"correct horse")
    for wrong in (b"", b"correct hors", b"correct horse\n", b"x" * (MAX_PASSWORD_BYTES + 1)):
        assert not hashed.matches(wrong)
    assert hash_password(b"correct horse") != hashed  # another salt


def test_the_published_vector() -> None:
    # RFC 7914, section 12: scrypt("password", "NaCl", N=1024, r=8, p=16, dkLen=64)
    digest = bytes.fromhex(
        "fdbabe1c9d3472007856e7190d01e9fe7c6ad7cbc8237830e77376634b3731622eaf30d92e22a3886ff109279d9830da"
        "c727afb94a83ee6d8360cbdfa2cc0640"
    )
    assert Hash(10, 8, 16, b"NaCl", digest).matches(b"password")


@given(salt=st.binary(min_size=9, max_size=64), digest=st.binary(min_size=17, max_size=64), ln=st.integers(10, 17))
def test_what_is_written_is_read_back(salt: bytes, digest: bytes, ln: int) -> None:
    hashed = Hash(ln, 8, 1, salt, digest)
    assert parse_hash(hashed.phc()) == hashed


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not one that is understood"),
        ("hunter2", "not one that is understood"),
        ("$scrypt$ln=14,r=8,p=1$c2FsdHNhbHRzYWx0$", "not one that is understood"),
        ("$scrypt$ln=9,r=8,p=1$c2FsdHNhbHRzYWx0$" + "A" * 43, "ln=9, r=8 is out of bounds"),
        ("$scrypt$ln=99,r=8,p=1$c2FsdHNhbHRzYWx0$" + "A" * 43, "ln=99, r=8 is out of bounds"),
        ("$scrypt$ln=14,r=0,p=1$c2FsdHNhbHRzYWx0$" + "A" * 43, "ln=14, r=0 is out of bounds"),
        ("$scrypt$ln=18,r=9,p=1$c2FsdHNhbHRzYWx0$" + "A" * 43, "at most 256 MiB"),
        ("$scrypt$ln=14,r=8,p=17$c2FsdHNhbHRzYWx0$" + "A" * 43, "p=17 is out of bounds"),
    ],
)
def test_a_hash_that_is_none_or_would_cost_too_much_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(UserError, match="users:3") as refused:
        parse_hash(text, where="users:3")
    assert complaint in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_decoy_costs_as_much_and_matches_nothing() -> None:
    like = Hash(11, 4, 2, b"salt" * 4, hashlib.sha256(b"").digest())
    decoy = decoy_hash(like)
    assert decoy[:3] == like[:3]
    assert len(decoy.digest) == len(like.digest)
    assert not decoy.matches(b"anything")
    assert decoy_hash(None)[:3] == hash_password(b"x")[:3]


@pytest.mark.parametrize("password", [b"", b"x" * (MAX_PASSWORD_BYTES + 1)])
def test_passwords_without_a_length_that_makes_sense_are_refused(password: bytes) -> None:
    with pytest.raises(UserError, match="1 to 512 bytes"):
        hash_password(password)


def test_no_hash_is_shown() -> None:
    hashed = hash_password(b"secret")
    assert hashed.digest.hex() not in repr(hashed)
    assert str(hashed) == "Hash(ln=14, r=8, p=1)"


def test_a_line_is_added_changed_in_place_and_removed_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert not set_line(path, "b", "b:1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# the team\n\na:1\nb:1\nc:1\n")
    assert set_line(path, "b", "b:2")
    assert path.read_text() == "# the team\n\na:1\nb:2\nc:1\n"
    assert set_line(path, "a", None)
    assert not set_line(path, "a", None)
    assert path.read_text() == "# the team\n\nb:2\nc:1\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["users"]


def test_changes_at_once_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "users"
    threads = [threading.Thread(target=set_line, args=(path, f"u{n}", f"u{n}:1")) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(path.read_text().split()) == sorted(f"u{n}:1" for n in range(16))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot change .*/no/users: No such file"):
        set_line(tmp_path / "no" / "users", "a", "a:1")


def test_a_password_file_loses_its_line_end_only(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("two words\n")
    assert read_password_file(path, where="--password-file") == "two words"
    path.write_text("\n")
    with pytest.raises(UserError, match=r"--password-file: .*password is empty"):
        read_password_file(path, where="--password-file")
    with pytest.raises(UserError, match="cannot read /nowhere: No such file"):
        read_password_file(Path("/nowhere"), where="--password-file")
