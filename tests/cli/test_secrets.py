"""A secret is read from where the user keeps it, and what is wrong there is said without showing it."""

from pathlib import Path

import pytest

from kvhearth.cli.secrets import ROUTER_KEY_VARIABLE, read_secret
from kvhearth.errors import UserError


def test_file_before_environment_before_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv(ROUTER_KEY_VARIABLE, "from-environment")
    assert read_secret(file, ROUTER_KEY_VARIABLE, option="--api-key-file") == "from-file"
    assert read_secret(None, ROUTER_KEY_VARIABLE, option="--api-key-file") == "from-environment"
    monkeypatch.setenv(ROUTER_KEY_VARIABLE, "")
    assert read_secret(None, ROUTER_KEY_VARIABLE, option="--api-key-file") is None


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    with pytest.raises(UserError, match=r"--api-key-file: .*empty is empty; put the secret into it"):
        read_secret(empty, ROUTER_KEY_VARIABLE, option="--api-key-file")
    with pytest.raises(UserError, match=r"--api-key-file: cannot read .*missing"):
        read_secret(tmp_path / "missing", ROUTER_KEY_VARIABLE, option="--api-key-file")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot read"):
        read_secret(tmp_path / "binary", ROUTER_KEY_VARIABLE, option="--api-key-file")
