"""A whole stack run from Python, as the demo does: in a thread, without signals."""

from __future__ import annotations

import io
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from rich.progress import Progress

from kvhearth.control import LocalStack, State
from kvhearth.errors import UserError
from kvhearth.stack import Emulator, Offload, Pool, Router, Stack, Store
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.server import StoreServer

from .conftest import children_left, is_gone

POOL = Pool(
    name="chat",
    model="Llama-3.1-8B",
    served_model_name="llama",
    replicas=1,
    num_gpu_blocks_override=512,
    offload=Offload(mode="shared", dram_size=1 << 30, blocks_per_chunk=16, dram_admission="lazy"),
    emulator=Emulator(time_scale=100.0),
)


def test_a_stack_runs_in_a_thread_and_tells_where_everything_is(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    router = Router(listen="127.0.0.1:0", policy="round-robin", api_key_file=str(key))
    config = tmp_path / "store.yaml"
    config.write_text("policy: lru\n")
    stack = Stack(name="t", pools=(POOL,), store=Store(size=16 << 20, config=str(config)), router=router)
    seen: dict[str, object] = {}

    def run() -> None:
        with LocalStack(stack, tmp_path / "logs") as running, Progress(console=Console(file=io.StringIO())) as bar:
            seen["ready"] = running.wait_ready(bar)
            seen["pids"] = [view.pid for view in running.children() if view.state is State.READY]
            seen["names"] = [view.name for view in running.children()]
            seen["engines"] = set(running.engine_urls)
            host, port = str(running.store_address).split(":")
            with socket.create_connection((host, int(port)), timeout=5) as store:
                store.sendall(b"*1\r\n$4\r\nPING\r\n")
                seen["store"] = store.recv(100)
                store.sendall(b"*3\r\n$6\r\nCONFIG\r\n$3\r\nGET\r\n$16\r\nmaxmemory-policy\r\n")
                seen["policy"] = store.recv(100).split()[-1]
            headers = {"Authorization": "Bearer s3cret"}
            seen["metrics"] = {
                name: httpx.get(url, headers=headers, timeout=10).status_code
                for name, url in running.metrics_urls.items()
            }
            body = {"model": "llama", "prompt": "Hello", "max_tokens": 2}
            url = f"{running.router_url}/v1/completions"
            seen["answers"] = [
                httpx.post(url, json=body, headers=headers, timeout=10).status_code,
                httpx.post(url, json=body, timeout=10).status_code,
            ]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(90)
    assert not thread.is_alive()
    pids = seen.pop("pids")
    assert seen == {
        "ready": True,
        "names": ["store", "chat-0", "router"],
        "engines": {"chat-0"},
        "store": b"+PONG\r\n",
        "policy": b"lru",
        "metrics": dict.fromkeys(("store", "chat-0", "router"), 200),
        "answers": [200, 401],
    }
    assert isinstance(pids, list)
    assert len(pids) == 3
    assert all(is_gone(pid) for pid in pids)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert set(logs) == {"store.log", "chat-0.log", "router.log"}
    assert all("ready" in text for text in logs.values())
    assert not any("s3cret" in text for text in logs.values())


def test_a_start_can_be_called_off_and_leaves_nothing(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    stack = Stack(pools=(POOL.model_copy(update={"offload": Offload()}),), router=Router(listen="127.0.0.1:0"))
    with LocalStack(stack) as running:
        assert running.wait_ready(cancelled=lambda: True) is False
        assert list(short_dir.iterdir())
    assert list(short_dir.iterdir()) == []
    assert children_left() == []


def test_a_stack_that_does_not_fit_starts_nothing() -> None:
    stack = Stack(name="big", pools=(Pool(model="Llama-3.1-70B"),))
    with pytest.raises(UserError, match=r"^big: pools\[0\]\.gpu: Llama-3.1-70B does not fit"):
        LocalStack(stack)
    assert children_left() == []


def test_a_log_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    stack = Stack(pools=(Pool(model="Llama-3.1-8B"),), router=Router(listen="127.0.0.1:0"))
    with pytest.raises(UserError, match=r"/file/logs: cannot make the directory: Not a directory"):
        LocalStack(stack, tmp_path / "file" / "logs")


def test_engines_use_a_store_that_runs_elsewhere_and_none_is_started(tmp_path: Path) -> None:
    with StoreServer(StoreConfig(capacity_bytes=16 << 20, listen="127.0.0.1:0")) as store:
        offload = Offload(mode="shared", dram_size=1 << 30, blocks_per_chunk=16)
        pool = POOL.model_copy(update={"offload": offload})
        router = Router(listen="127.0.0.1:0")
        stack = Stack(name="t", pools=(pool,), store=Store(address=store.address), router=router)
        with LocalStack(stack, tmp_path / "logs") as running:
            assert running.wait_ready()
            assert [view.name for view in running.children()] == ["chat-0", "router"]
            body = {"model": "llama", "prompt": "x " * 4000, "max_tokens": 2}
            assert httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=20).status_code == 200
            deadline = time.monotonic() + 20
            while not len(store.store.table) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert len(store.store.table)
