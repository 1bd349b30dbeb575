"""A stack with real-engine pools, run with a stand-in for vLLM: children, addresses, environment, failures, ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvhearth.control import LocalStack, RestartPolicy, State
from kvhearth.errors import UserError
from kvhearth.stack import Stack, parse_stack

from .conftest import children_left, eventually, is_gone
from .vllm_stand_in import environment

QUICK = RestartPolicy(first_delay_seconds=0.05, short_life_seconds=0.0)


def stack(folder: Path, *, mode: str = "shared", replicas: int = 2, **pool: Any) -> Stack:
    vllm = {"python": str(environment(folder / "env")), "kv_events": True}
    described = {
        "name": "chat",
        "engine": "vllm",
        "model": "org/model",
        "served_model_name": "served",
        "block_size": 32,
        "replicas": replicas,
        "offload": {"mode": mode, "dram_size": "1GiB"},
        "vllm": vllm,
        **pool,
    }
    router = {"listen": "127.0.0.1:0", "policy": "round-robin"}
    return parse_stack(json.dumps({"pools": [described], "store": {"size": "16MiB"}, "router": router}))


def told(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/told", timeout=5).json())


def test_engines_are_told_their_addresses_and_serve_behind_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "of-another-engine")
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "hunter2")
    logs = tmp_path / "logs"
    with LocalStack(stack(tmp_path), logs) as running:
        assert running.wait_ready()
        engines = {name: told(url) for name, url in running.engine_urls.items()}
        assert set(engines) == {"chat-0", "chat-1"}
        listening: list[str] = []
        for engine in engines.values():
            args = engine["args"]
            transfer = json.loads(args[args.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
            events = json.loads(args[args.index("--kv-events-config") + 1])
            assert transfer["secondary_tiers"][0]["address"] == running.store_socket
            listening += [transfer["snapshot_listen"], events["endpoint"], events["replay_endpoint"]]
            assert engine["env"] == {
                "PYTHONHASHSEED": "0",
                "VLLM_API_KEY": "",
                "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "KVHEARTH_STORE_PASSWORD": "hunter2",
            }
            assert "hunter2" not in " ".join(args)
        assert len(set(listening)) == 6, "every address is its own"
        body = {"model": "served", "prompt": "x", "max_tokens": 1}
        answer = httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=10)
        assert answer.json()["choices"][0]["text"] == "hi"
    assert children_left() == []


def test_a_killed_engine_takes_its_processes_with_it_and_comes_back_at_its_address(tmp_path: Path) -> None:
    with LocalStack(stack(tmp_path, mode="none", replicas=1), policy=QUICK) as running:
        assert running.wait_ready()
        pid = running.child("chat-0").pid
        assert pid is not None
        members = psutil.Process(pid).children(recursive=True)
        assert "sleep" in [member.name() for member in members]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: all(is_gone(member.pid) for member in members), "its processes gone")
        eventually(lambda: running.child("chat-0").restarts == 1, "restarted")
        eventually(lambda: running.child("chat-0").state is State.READY, "back")
        assert told(running.engine_urls["chat-0"])["args"]


def test_an_engine_that_cannot_start_is_told_in_its_cores_words(tmp_path: Path) -> None:
    with LocalStack(stack(tmp_path, mode="none", max_model_len=13)) as running:
        line = r"^chat-\d: exited with code 1 before the stack was ready: ValueError: 13 is unlucky$"
        with pytest.raises(UserError, match=line):
            running.wait_ready()
    assert children_left() == []


def test_an_engine_is_given_the_time_that_its_pool_says(tmp_path: Path) -> None:
    slow = stack(tmp_path, mode="none", replicas=1)
    (tmp_path / "env" / "site" / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(
        "import time\nprint('loading weights', flush=True)\ntime.sleep(600)"
    )
    vllm = slow.pools[0].vllm.model_copy(update={"start_seconds": 2.0})
    slow = slow.model_copy(update={"pools": (slow.pools[0].model_copy(update={"vllm": vllm}),)})
    line = r"chat-0: not ready within 2 s .*; it last said: loading weights"
    with LocalStack(slow) as running, pytest.raises(UserError, match=line):
        running.wait_ready()


def test_an_unsupported_version_starts_nothing(tmp_path: Path) -> None:
    made = stack(tmp_path)
    (tmp_path / "env" / "site" / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.29.0\n")
    with pytest.raises(UserError, match=r"^local: pools\[0\]\.vllm\.python: vLLM 0\.29\.0 is not supported"):
        LocalStack(made)
    assert children_left() == []
