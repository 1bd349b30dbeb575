"""``kvhearth router serve`` as a process: ready line, clean stop, bad input."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from kvhearth.cli.router import app
from kvhearth.errors import UserError

COMMAND = [sys.executable, "-c", "from kvhearth.cli.router import app; app()", "serve"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_when_it_is_ready_serves_and_stops_cleanly(lab, number):
    engine = lab.engine()
    arguments = ["--listen", "127.0.0.1:0", "--engine", f"mine={engine.url}", "--policy", "least-loaded"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(
                r"router ready on http://127\.0\.0\.1:(\d+), policy least-loaded, 1 engine\(s\)\n", line
            )
            assert found, line
            from_lab = type(lab.router(engine).wire())
            wire = from_lab(int(found[1]))
            wire.prompt()
            status, lines, _ = wire.response()
            assert (status, dict(lines)["x-kvhearth-engine"]) == (200, "mine")
            process.send_signal(number)
            assert process.wait(10) == 0
            assert wire.rest() == b""
            wire.close()
        finally:
            process.kill()


def test_it_serves_what_a_file_says(lab, tmp_path):
    engine = lab.engine()
    path = tmp_path / "router.yaml"
    path.write_text(f"listen: 127.0.0.1:0\npolicy: round-robin\nengines: [{{name: mine, url: '{engine.url}'}}]\n")
    arguments = ["--config", str(path), "--policy", "least-loaded"]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.endswith(", policy least-loaded, 1 engine(s)\n"), line
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            process.kill()


def test_bad_input_is_a_user_error():
    for arguments, said in (
        (["--engine", "nonsense"], "engine nonsense"),
        (["--engine", "http://h:1", "--listen", "0.0.0.0:1"], "no API key"),
        (["--engine", "http://h:1", "--policy", "magic"], "magic"),
    ):
        with pytest.raises(UserError, match=said):
            app(["serve", *arguments], standalone_mode=False)
