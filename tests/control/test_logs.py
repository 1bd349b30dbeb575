"""Logs stay bounded while a child holds them open, and give up their last words."""

from __future__ import annotations

import os
from pathlib import Path

from kvhearth.control.logs import BoundedLog


def test_a_log_that_passes_its_limit_is_emptied_in_place_and_its_end_is_kept(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", limit_bytes=1000)
    fd = log.open_for_child()
    for number in range(5000):
        os.write(fd, b"line %05d\n" % number)
        if number % 50 == 0:
            log.trim()
    assert log.path.stat().st_size <= 1000 + 50 * 11
    assert (tmp_path / "a.log.1").stat().st_size <= 1000
    assert log.tail(1) == ["line 04999"]
    os.close(fd)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "a.log.1"]


def test_a_log_below_its_limit_is_left_alone(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", limit_bytes=1000)
    log.path.write_text("x" * 1000)
    log.trim()
    assert log.path.stat().st_size == 1000


def test_logs_are_for_their_owner_only(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log")
    os.close(log.open_for_child())
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_the_last_error_is_the_childs_own_error_line_else_its_last_line(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log")
    assert log.last_error() == ""
    log.path.write_text("starting\nboom\n\n")
    assert log.last_error() == "boom"
    log.path.write_text("starting\nkvhearth: error: port 1 is taken\nbye\n")
    assert log.last_error() == "port 1 is taken"


def test_what_vllms_last_words_point_back_to_is_the_last_error(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log")
    log.path.write_text(
        "(Worker pid=8) ERROR 11-30 [core.py:9] ValueError: not enough KV for 4096 tokens\n"
        "(EngineCore pid=7) Exception: WorkerProc initialization failed. See stack trace for root cause.\n"
        + "(APIServer pid=6)   File 'x.py', line 1\n"
        * 300
        + "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n"
        "leaked shared_memory objects to clean up at shutdown\n"
    )
    assert log.last_error() == "ValueError: not enough KV for 4096 tokens"
