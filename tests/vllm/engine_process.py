"""A real vLLM engine on the CPU in a process of its own, told what to do over a pipe; it can be killed like one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

START_SECONDS = 240.0
CALL_SECONDS = 300.0


class EngineFailed(RuntimeError):
    """The engine said why."""


class EngineProcess:
    """One engine. Calls return what the engine answers or raise `EngineFailed`.

    Args:
        model: directory of the model.
        extra: ``kv_connector_extra_config`` beside the spec's name; None: no connector.
        options: further arguments of vLLM's ``LLM``.
    """

    def __init__(self, model: Path, extra: dict[str, Any] | None, **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvhearth-engine-")
        address = str(Path(self._folder.name) / "socket")
        self.log = Path(self._folder.name) / "log"
        env = {
            **os.environ,
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
            "HF_HUB_OFFLINE": "1",
        }
        with Listener(address, authkey=b"kvhearth-test") as listener:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, __file__, address], stdout=log, stderr=subprocess.STDOUT, env=env
                )
            self._pipe: Connection = listener.accept()
        self.call("start", str(model), extra, options, timeout=START_SECONDS)

    def call(self, name: str, *args: Any, timeout: float = CALL_SECONDS) -> Any:
        """Have it do something and wait."""
        self.tell(name, *args)
        return self.answer(timeout)

    def tell(self, name: str, *args: Any) -> None:
        """Have it do something."""
        self._pipe.send((name, args))

    def answer(self, timeout: float = CALL_SECONDS) -> Any:
        """What came of the last `tell`."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"no answer in {timeout} s; the engine's log ends with\n{self.tail()}")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            raise EngineFailed(f"the engine is gone; its log ends with\n{self.tail()}") from None
        if not ok:
            raise EngineFailed(f"{value}\n{self.tail()}")
        return value

    def generate(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        """One prompt: ``tokens``, ``logprobs`` (of each generated token the most likely ones), ``cached`` tokens."""
        found: dict[str, Any] = self.call("generate", [{"prompt": prompt, **more}])[0]
        return found

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        """As the kernel does when memory is short."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            try:
                self.tell("stop")
                self.process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self.kill()
        self._pipe.close()
        self._folder.cleanup()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Engine:
    """The child's side."""

    def __init__(self, model: str, extra: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM

        if extra is not None:
            named = {"spec_name": "HearthOffloadingSpec", "spec_module_path": "kvhearth.connector"}
            options["kv_transfer_config"] = {
                "kv_connector": "HearthConnector",
                "kv_connector_module_path": "kvhearth.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {**named, **extra},
                **options.pop("transfer", {}),
            }
        self.llm = LLM(
            model,
            **{
                "dtype": "float32",
                "block_size": 32,
                "enforce_eager": True,
                "num_gpu_blocks_override": 160,
                "max_model_len": 4096,
                "enable_prefix_caching": True,
                "prefix_caching_hash_algo": "sha256_cbor",
                "disable_log_stats": False,
                "seed": 0,
                **options,
            },
        )
        self.core = self.llm.llm_engine.engine_core.engine_core

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        prompts, params = [], []
        for request in requests:
            salt = {"cache_salt": request["salt"]} if request.get("salt") else {}
            prompts.append({"prompt_token_ids": request["prompt"], **salt})
            transfer = request.get("params")
            params.append(
                SamplingParams(
                    max_tokens=request.get("output", 4),
                    temperature=0,
                    ignore_eos=True,
                    logprobs=request.get("logprobs", 5),
                    extra_args={"kv_transfer_params": transfer} if transfer else None,
                )
            )
        started = time.monotonic()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - started
        return [
            {
                "tokens": list(out.outputs[0].token_ids),
                "logprobs": [
                    {token: entry.logprob for token, entry in step.items()} for step in out.outputs[0].logprobs or []
                ],
                "cached": out.num_cached_tokens,
                "seconds": seconds,
            }
            for out in outputs
        ]

    def settle(self) -> None:
        """Step until every transfer is over, as an engine with a loop of its own does."""
        connector = self.core.scheduler.connector
        deadline = time.monotonic() + 60
        while connector.has_pending_push_work() and time.monotonic() < deadline:
            self.core.step_fn()

    def metrics(self) -> dict[str, float]:
        """Counters and gauges, summed over labels."""
        from prometheus_client import REGISTRY

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith(("vllm:", "kvhearth_")):
                    name = sample.name.removesuffix("_total")
                    found[name] = found.get(name, 0) + sample.value
        return found

    def forget_hbm(self) -> bool:
        return bool(self.core.scheduler.reset_prefix_cache())

    def reset(self) -> bool:
        return bool(self.core.scheduler.reset_prefix_cache(reset_connector=True))

    def forget_dram(self) -> None:
        self.settle()
        self.core.scheduler.connector.connector_scheduler.manager.primary_tier.reset_cache()

    def zero_a_chunk(self) -> None:
        """Spoil a chunk in DRAM."""
        primary = self.core.scheduler.connector.connector_scheduler.manager.primary_tier
        view = primary.get_kv_memoryview().cast("B")
        row = primary.get_kv_memoryview().strides[0]
        view[40 * row : 41 * row] = bytes(row)

    def shm_files(self) -> list[str]:
        """Names of this engine's DRAM."""
        engine_id = self.core.vllm_config.kv_transfer_config.engine_id
        return sorted(path.name for path in Path("/dev/shm").glob(f"vllm_offload_{engine_id}*"))


def _child(address: str) -> None:
    engine: _Engine | None = None
    with Client(address, authkey=b"kvhearth-test") as pipe:
        while True:
            try:
                name, args = pipe.recv()
            except EOFError:
                return
            if name == "stop":
                if engine is not None:
                    engine.core.shutdown()
                return
            try:
                if name == "start":
                    engine, value = _Engine(*args), None
                else:
                    value = getattr(engine, name)(*args)
                pipe.send((True, value))
            except Exception as error:
                pipe.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    _child(sys.argv[1])
