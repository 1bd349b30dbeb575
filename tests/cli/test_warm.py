"""`kvhearth warm` as a user runs it, against an emulated engine and the router in front of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.cli.main import run
from kvhearth.control import LocalStack
from kvhearth.stack import Emulator, Pool, Router, Stack

PROMPTS = """
- name: support
  prompt: {text}
- messages: [{{role: system, content: Be brief.}}]
  pin: false
  cache_salt: a
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.yaml"
    path.write_text(PROMPTS.format(text="word " * 200))
    return path


def test_prompts_are_warm_at_the_router_and_the_engine(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret")
    pool = Pool(model="Llama-3.1-8B", name="chat", emulator=Emulator(time_scale=100.0))
    stack = Stack(pools=(pool,), router=Router(listen="127.0.0.1:0", api_key_file=str(key)))
    with LocalStack(stack) as running:
        assert running.wait_ready()
        urls = ["--url", running.router_url, "--url", running.engine_urls["chat-0"]]
        assert run(["warm", str(prompts), *urls, "--api-key-file", str(key)]) == 0
        table = capsys.readouterr().out
        assert table.count(" ok ") == 4
        assert table.count("support") == table.count("prompt 2") == 2
        assert "200" in table
        assert run(["warm", str(prompts), "--url", running.router_url]) == 1
        refused = capsys.readouterr().out
        assert refused.count("HTTP 401") == 2


def test_an_address_where_nobody_is_fails_every_prompt(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", str(prompts), "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().out.count("no answer") == 2


def test_bad_input_is_one_line_and_exit_code_2(prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warm", str(prompts), "--url", "127.0.0.1"]) == 2
    assert capsys.readouterr().err.startswith("kvhearth: error: --url: '127.0.0.1'; give http://host:port")
    prompts.write_text("- {prompt: x, pin: perhaps}")
    assert run(["warm", str(prompts), "--url", "http://127.0.0.1:9"]) == 2
    assert capsys.readouterr().err.startswith(f"kvhearth: error: {prompts}: [0].pin: ")
