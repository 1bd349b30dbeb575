"""A pool becomes one exact vLLM command, mode by mode."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest

from kvhearth.control.vllm_args import Command, EngineAddresses, shell_command, vllm_command
from kvhearth.stack import Pool

AT = EngineAddresses("127.0.0.1:8001", store="127.0.0.1:7420")


def pool(**fields: Any) -> Pool:
    return Pool.model_validate({"name": "chat", "model": "org/model", "engine": "vllm", **fields})


def flags(command: Command) -> dict[str, str]:
    """Flag → its value ("" for a switch)."""
    found: dict[str, str] = {}
    words = list(command.argv)
    for index, word in enumerate(words):
        if word.startswith("--"):
            value = words[index + 1] if index + 1 < len(words) else "--"
            found[word] = "" if value.startswith("--") else value
    return found


def transfer(command: Command) -> Any:
    return json.loads(flags(command)["--kv-transfer-config"])


def test_an_engine_without_offloading_has_no_connector() -> None:
    command = vllm_command(pool(max_model_len=4096), AT)
    assert command.argv[:3] == ("vllm", "serve", "org/model")
    assert flags(command) == {
        "--served-model-name": "org/model",
        "--host": "127.0.0.1",
        "--port": "8001",
        "--tensor-parallel-size": "1",
        "--block-size": "16",
        "--max-num-seqs": "256",
        "--max-num-batched-tokens": "8192",
        "--max-model-len": "4096",
        "--seed": "0",
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--shutdown-timeout": "10",
        "--disable-access-log-for-endpoints": "/health,/metrics,/v1/models",
        "--enable-prefix-caching": "",
        "--enable-prompt-tokens-details": "",
    }
    assert command.env == {"PYTHONHASHSEED": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def test_the_pools_fields_become_vllms_flags_and_variables() -> None:
    command = vllm_command(
        pool(
            served_model_name="chat",
            tensor_parallel_size=2,
            block_size=32,
            num_gpu_blocks_override=160,
            vllm={
                "python": "/env/bin/python",
                "dtype": "float32",
                "seed": 7,
                "enforce_eager": True,
                "cpu_kvcache_space": "4GiB",
                "hash_algo": "xxhash_cbor",
                "extra_args": ["--stream-interval", "4"],
                "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-3"},
            },
        ),
        AT,
    )
    assert command.argv[:5] == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model")
    assert command.argv[-2:] == ("--stream-interval", "4")
    given = flags(command)
    expected = {"--served-model-name": "chat", "--tensor-parallel-size": "2", "--num-gpu-blocks-override": "160"}
    expected |= {
        "--dtype": "float32",
        "--seed": "7",
        "--enforce-eager": "",
        "--prefix-caching-hash-algo": "xxhash_cbor",
    }
    assert expected.items() <= given.items()
    assert "--max-model-len" not in given, "the model's own"
    assert command.env == {
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "HF_HUB_OFFLINE": "1",
    }


def test_mode_native_loads_the_connector_without_a_store() -> None:
    offload = {"mode": "native", "dram_size": "2GiB", "blocks_per_chunk": 4, "dram_admission": "lazy"}
    assert transfer(vllm_command(pool(offload=offload), AT)) == {
        "kv_connector": "HearthConnector",
        "kv_connector_module_path": "kvhearth.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HearthOffloadingSpec",
            "spec_module_path": "kvhearth.connector",
            "cpu_bytes_to_use": 2 << 30,
            "blocks_per_chunk": 4,
            "dram_admission": "lazy",
            "self_describing_kv_events": True,
        },
    }


def test_mode_shared_adds_the_store_behind_dram() -> None:
    offload = {"mode": "shared", "store_admission": "second-sight", "lookup_timeout_seconds": 0.2}
    extra = transfer(vllm_command(pool(offload=offload), AT))["kv_connector_extra_config"]
    assert extra["dram_admission"] == "eager"
    assert extra["secondary_tiers"] == [
        {
            "type": "StoreTier",
            "module_path": "kvhearth.connector",
            "address": "127.0.0.1:7420",
            "pool": "chat",
            "store_admission": "second-sight",
            "lookup_timeout_seconds": 0.2,
        }
    ]


def test_events_and_the_snapshot_are_told_where_to_listen() -> None:
    at = EngineAddresses("127.0.0.1:1", None, "ipc:///run/e.zmq", "127.0.0.1:5558", "127.0.0.1:8101")
    command = vllm_command(pool(offload={"mode": "native"}), at)
    assert json.loads(flags(command)["--kv-events-config"]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "ipc:///run/e.zmq",
        "replay_endpoint": "tcp://127.0.0.1:5558",
    }
    assert transfer(command)["kv_connector_extra_config"]["snapshot_listen"] == "127.0.0.1:8101"


def test_lmcache_is_configured_through_its_own_variables() -> None:
    offload = {"mode": "lmcache", "dram_size": "10GiB", "blocks_per_chunk": 16}
    command = vllm_command(pool(offload=offload, tensor_parallel_size=4, vllm={"device": "cuda"}), AT)
    assert transfer(command) == {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert command.env == {
        "PYTHONHASHSEED": "0",
        "LMCACHE_LOCAL_CPU": "true",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2.5",
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_TRACK_USAGE": "false",
    }


@pytest.mark.parametrize("mode", ["none", "native", "shared", "lmcache"])
def test_the_stores_password_is_in_no_command(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "hunter2")
    assert "hunter2" not in shell_command(vllm_command(pool(offload={"mode": mode}), AT))


def test_a_shell_reads_the_printed_command_back_as_it_was() -> None:
    words = ("--odd value", "it's", '{"a b": "$HOME"}')
    command = vllm_command(
        pool(offload={"mode": "shared"}, vllm={"extra_args": ["-O1", *words], "env": {"A": "x y"}}), AT
    )
    text = shell_command(command)
    assert text.splitlines()[0] == "PYTHONHASHSEED=0 \\"
    assert "\nvllm serve org/model \\\n  --served-model-name org/model \\\n" in text
    variables = len(command.env)
    read = shlex.split(text.replace("\\\n", " "))
    assert dict(word.split("=", 1) for word in read[:variables]) == command.env
    assert tuple(read[variables:]) == command.argv
    script = text.replace("vllm serve", "printf '%s\\n' serve")
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout.splitlines()[-3:] == list(words)
