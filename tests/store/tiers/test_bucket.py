"""Objects' names hold any key and give it back; a bucket's address is checked where it enters."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.store.tiers.bucket import Bucket, S3Access, key_of, name_of


@given(st.binary(min_size=1, max_size=512))
def test_a_name_holds_any_key_and_fits_s3_and_file_systems(key: bytes) -> None:
    name = name_of(key)
    assert key_of(name) == key
    assert len(name) <= 700
    assert all(0 < len(part) <= 255 and part not in (".", "..") for part in name.split("/"))


@given(st.text(max_size=60))
def test_other_names_are_none_of_ours(name: str) -> None:
    key = key_of(name)
    assert key is None or name_of(key) == name


def test_no_name_is_a_folder_of_another() -> None:
    long = b"k" * 200
    for nbytes in range(1, 200):
        assert not name_of(long).startswith(name_of(long[:nbytes]) + "/")


@pytest.mark.parametrize(
    "url", ["", "bucket/prefix", "http://host/bucket", "s3://", "s3:///prefix", "file://host/path", "file:relative"]
)
def test_what_is_no_place_for_objects_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="object"):
        Bucket(url, S3Access(), 1.0, 0)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="credentials") as caught:
        Bucket("s3://AKIA:verysecret@bucket/prefix", S3Access(), 1.0, 0)
    assert "verysecret" not in str(caught.value)


def test_secrets_do_not_show() -> None:
    assert "verysecret" not in repr(S3Access("http://e", "r", "AKIA", "verysecret"))
    assert "AKIA" not in str(S3Access("http://e", "r", "AKIA", "verysecret"))


def test_a_folder_that_is_not_there_is_no_error_yet(tmp_path: Path) -> None:
    Bucket(f"file://{tmp_path}/missing", S3Access(), 1.0, 0)
