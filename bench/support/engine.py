"""A real vLLM engine as a child process: started with an offload mode, asked with token ids, measured from outside by
its metrics page and the kernel's account of its threads. Needs nothing of vLLM in the process that uses it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvhearth.metrics import parse_exposition

START_SECONDS = 240.0
REQUEST_SECONDS = 240.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_ROOT = Path(__file__).resolve().parents[2]


class Completion(NamedTuple):
    """An answer: seconds to the first token and in all, and each token's log-probability where asked for."""

    first_token_seconds: float
    seconds: float
    tokens: int
    logprobs: tuple[float, ...] = ()


class Cpu(NamedTuple):
    """CPU seconds so far: of every thread of the engine, and of those that the connector started."""

    engine_seconds: float
    connector_seconds: float
    connector_threads: int


def vllm_python(given: str | None) -> str | None:
    """The interpreter that has vLLM: the given one, else the repository's ``.venv-vllm`` or this one; None for none."""
    for candidate in [given] if given else [str(_ROOT / ".venv-vllm/bin/python"), sys.executable]:
        check = [
            candidate,
            "-P",
            "-c",
            "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)",
        ]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run(check, timeout=60, cwd="/", check=False).returncode == 0:
                return candidate
    return None


def end_children_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, as Ctrl-C does, so that no engine or store outlives its benchmark."""

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def tiny_llama(python: str, folder: Path) -> Path:
    """Our random Llama, made in ``folder``."""
    command = [python, "-m", "kvhearth.connector.tiny_models", "--kind", "llama", "--out", str(folder / "llama")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    return folder / "llama"


def transfer_config(
    dram_bytes: int,
    store: str | None = None,
    *,
    patience_seconds: float | None = None,
    shared_memory: bool = True,
    **extra: Any,
) -> dict[str, Any]:
    """``--kv-transfer-config`` of mode native, or of mode shared with the address of a store. ``patience_seconds``: in
    place of each of the tier's deadlines, for a busy machine; else their defaults."""
    tier: dict[str, Any] = {"type": "StoreTier", "module_path": "kvhearth.connector", "address": store, "pool": "bench"}
    if not shared_memory:
        tier["shared_memory"] = False
    if patience_seconds is not None:
        tier |= {f"{call}_timeout_seconds": patience_seconds for call in ("lookup", "load", "put")}
    return {
        "kv_connector": "HearthConnector",
        "kv_connector_module_path": "kvhearth.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HearthOffloadingSpec",
            "spec_module_path": "kvhearth.connector",
            "cpu_bytes_to_use": dram_bytes,
            **extra,
            **({"secondary_tiers": [tier]} if store else {}),
        },
    }


class Engine:
    """One running engine. Made by `engine`.

    Args:
        python: interpreter that has vLLM.
        model: folder of the model.
        flags: of vLLM's server, beyond those that every engine here has.
        config: ``--kv-transfer-config``; None for mode none.
        log: where its output goes.
        cuda: whether it runs on a GPU (the model's type) or on the CPU (float32, which is quick on any).
    """

    def __init__(
        self, python: str, model: Path, flags: Sequence[str], config: dict[str, Any] | None, log: Path, *, cuda: bool
    ) -> None:
        self.port = _free_port()
        self._log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--shutdown-timeout", "10", "--dtype", "auto" if cuda else "float32", *flags]
        if config is not None:
            command += ["--kv-transfer-config", json.dumps(config)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1"}
        if not cuda:
            cores = len(os.sched_getaffinity(0))
            env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(cores)}
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=log.parent, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        """Return once it answers; SystemExit with the end of its log when it ends or takes too long."""
        give_up = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up and self._process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._get("/health")[0] == 200:
                    return
            time.sleep(0.25)
        tail = self._log.read_text(errors="replace").splitlines()[-25:]
        raise SystemExit("\n".join(["the engine did not start; its last words:", *tail]))

    def complete(
        self, prompt: Sequence[int], *, tokens: int = 1, logprobs: bool = False, transfer: dict[str, Any] | None = None
    ) -> Completion:
        """Generate greedily after a prompt of token ids."""
        body: dict[str, Any] = {"model": "tiny", "prompt": list(prompt), "max_tokens": tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        if logprobs:
            body["logprobs"] = 0
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
        started = time.perf_counter()
        first: float | None = None
        found: list[float] = []
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"the engine answered {answer.status}: {answer.read(2000)!r}")
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter() - started
                event = json.loads(line[6:])
                if "error" in event:
                    raise SystemExit(f"the engine gave up: {event['error']}")
                for choice in event["choices"]:
                    found += (choice.get("logprobs") or {}).get("token_logprobs") or []
        finally:
            connection.close()
        if first is None:
            raise SystemExit("the engine answered without a token")
        return Completion(first, time.perf_counter() - started, tokens, tuple(found))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry ``labels``; 0 when there are none."""
        status, page = self._get("/metrics")
        if status != 200:
            raise SystemExit(f"the engine's /metrics answered {status}")
        samples = parse_exposition(page.decode()).get(name, {})
        return sum(value for found, value in samples.items() if labels.items() <= dict(found).items())

    def cpu(self) -> Cpu:
        """What the kernel counted for the engine's processes, a hundredth of a second exact for each thread."""
        total, connector, threads = 0.0, 0.0, 0
        for pid in _family(self._process.pid):
            for task in Path(f"/proc/{pid}/task").glob("*"):
                try:
                    name, seconds = _thread(task)
                except (OSError, ValueError):  # it ended just now
                    continue
                total += seconds
                if name.startswith("kvhearth"):
                    connector += seconds
                    threads += 1
        return Cpu(total, connector, threads)

    def stop(self) -> None:
        """End it and whatever it started."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def engine(
    python: str,
    model: Path,
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    flags: Sequence[str] = (),
    cuda: bool = False,
) -> Iterator[Engine]:
    """A running engine, its log in ``folder``; ended on the way out, whatever happened."""
    started = Engine(python, model, flags, config, folder / f"engine-{time.monotonic_ns()}.log", cuda=cuda)
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.stop()


def _thread(task: Path) -> tuple[str, float]:
    line = (task / "stat").read_text()
    name = line[line.index("(") + 1 : line.rindex(")")]
    fields = line[line.rindex(")") + 2 :].split()
    return name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND  # utime and stime, proc_pid_stat(5)


def _family(pid: int) -> list[int]:
    """A process and everything below it."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError, ValueError):
                found += [int(child) for child in children.read_text().split()]
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
