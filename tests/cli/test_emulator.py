"""`kvhearth emulator serve` as a user runs it: ready line, signals, wrong flags."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

BASE = ["--model", "llama-3.1-8b", "--gpu", "h100", "--num-gpu-blocks-override", "500"]


def run(*flags: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "kvhearth", "emulator", "serve", *flags]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_says_one_line_when_ready_and_ends_cleanly_on_sigterm() -> None:
    with run(*BASE, "--listen", "127.0.0.1:0") as process:
        try:
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+", line)
            assert line.startswith("emulator ready on http://"), process.stderr.read()
            with urllib.request.urlopen(f"{url[0]}/health", timeout=20) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=30)
            assert (process.returncode, out, err) == (0, "", "")
        finally:
            process.kill()


def refusal(*flags: str) -> str:
    with run(*flags) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, ""), err
        return err


def test_a_busy_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"{port} is already in use" in refusal(*BASE, "--port", str(port))


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--model", "llama-3.1-70b", "--gpu", "h100"], "does not fit"),
        ([*BASE, "--listen", "0.0.0.0:0"], "KVHEARTH_EMULATOR_API_KEY"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(flags: list[str], names: str) -> None:
    message = refusal(*flags)
    assert names in " ".join(message.split())


def test_a_store_that_nobody_serves_is_refused_unless_it_may_be_down() -> None:
    flags = [*BASE, "--listen", "127.0.0.1:0", "--offload-mode", "shared", "--store", "127.0.0.1:9"]
    message = " ".join(refusal(*flags).split())
    assert "store: no answer from 127.0.0.1:9 (unreachable); start it with `kvhearth store serve`" in message
    with run(*flags, "--store-may-be-down") as process:
        try:
            assert process.stdout.readline().startswith("emulator ready on http://")
        finally:
            process.kill()
