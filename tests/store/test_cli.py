"""`kvhearth store` as a user runs it: real processes, signals and exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 30.0
KVHEARTH = [sys.executable, "-c", "from kvhearth.cli.main import main; main()", "store"]


@contextmanager
def serving(*flags: str, password: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store process and the line it printed when it was ready."""
    env = {**os.environ, **({"KVHEARTH_STORE_PASSWORD": password} if password else {})}
    command = [*KVHEARTH, "serve", "--capacity", "8MiB", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def kvhearth(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVHEARTH, *args], capture_output=True, text=True, timeout=SECONDS, check=False)


def test_serve_says_where_it_listens_answers_and_stops_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving("--listen", "127.0.0.1:0", "--unix", str(path), "--metrics-listen", "127.0.0.1:0") as (process, ready):
        pattern = r"kvhearth store ready: (127.0.0.1:\d+), unix:\S+/s, http://127.0.0.1:\d+/metrics, capacity 8 MiB\n"
        found = re.fullmatch(pattern, ready)
        assert found is not None, ready
        assert kvhearth("ping", "--address", found[1]).stdout == "PONG\n"
        assert "maxmemory 8388608\n" in kvhearth("stats", "--address", f"unix:{path}").stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert not path.exists()


def test_a_password_in_the_environment_or_a_file_is_needed_and_enough(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    with serving("--listen", "0.0.0.0:0", password="secret") as (process, ready):
        port = ready.partition("0.0.0.0:")[2].partition(",")[0]
        address = ["--address", f"127.0.0.1:{port}"]
        refused = kvhearth("ping", *address)
        assert (refused.returncode, "refused" in refused.stderr) == (2, True)
        assert kvhearth("ping", *address, "--password-file", str(tmp_path / "password")).stdout == "PONG\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["serve", "--capacity", "lots"], "--capacity: 'lots' is not a size; write bytes"),
        (["serve", "--listen", "0.0.0.0:0"], "there is no password"),
        (["serve", "--password-file", "/nowhere"], "--password-file: cannot read /nowhere"),
        (["ping", "--address", "127.0.0.1:1"], "no answer from 127.0.0.1:1 (unreachable); start it with"),
        (["stats", "--address", "127.0.0.1:1"], "no answer from 127.0.0.1:1 (unreachable); start it with"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(args: list[str], complaint: str) -> None:
    done = kvhearth(*args)
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
