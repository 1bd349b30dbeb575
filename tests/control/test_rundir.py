"""The private directory: ours alone, short enough for sockets, and never left behind for good."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvhearth.control.rundir import RunDir
from kvhearth.errors import UserError


def test_it_is_private_and_gone_after_close(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    run_dir = RunDir()
    assert run_dir.path.parent == short_dir
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(run_dir.socket_path("store.sock"))
    run_dir.close()
    assert list(short_dir.iterdir()) == []


def test_what_a_killed_supervisor_left_is_removed_by_the_next_and_a_live_one_is_not(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    killed = "import os; from kvhearth.control.rundir import RunDir; kept = RunDir(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", killed], timeout=60)
    (left,) = short_dir.iterdir()
    not_ours = short_dir / "kvhearth-notes"
    not_ours.mkdir()
    first = RunDir()
    assert not left.exists()
    second = RunDir()
    assert first.path.exists()
    assert not_ours.exists()
    first.close()
    second.close()


def test_a_base_too_long_for_a_socket_path_is_passed_over(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = short_dir / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    run_dir = RunDir()
    try:
        assert not run_dir.path.is_relative_to(long)
        assert len(os.fsencode(run_dir.socket_path("store.sock"))) <= 107
    finally:
        run_dir.close()


def test_no_usable_base_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(UserError, match="XDG_RUNTIME_DIR: no directory for sockets"):
        RunDir()
