"""Commands to copy: one a pool, at fixed addresses, with what to know about each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvhearth.control.engine_args import pool_commands
from kvhearth.errors import UserError
from kvhearth.stack import Stack


def stack(*pools: dict[str, Any], **store: Any) -> Stack:
    made = [{"name": f"p{n}", "model": "org/model", "engine": "vllm", **pool} for n, pool in enumerate(pools)]
    return Stack.model_validate({"pools": made, "store": store})


def port(command: Any) -> str:
    return str(command.command.argv[command.command.argv.index("--port") + 1])


def test_each_pool_has_ports_of_its_own() -> None:
    first, second = pool_commands(stack({"replicas": 3}, {"vllm": {"kv_events": True}}), where="f")
    assert (port(first), port(second)) == ("8001", "8004")
    assert "tcp://127.0.0.1:5560" in str(second.command.argv)
    assert "-3.zmq" in str(second.command.argv)
    assert first.notes == (
        "pool p0: vLLM 0.32 (runs in the tests, assumed: set vllm.version), offload mode none",
        "3 replicas: run it so often; on one machine give each its own --port",
    )


def test_one_pool_can_be_asked_for_and_emulated_ones_are_left_out() -> None:
    two = stack({}, {"engine": "emulated", "model": "Llama-3.1-8B"})
    assert [each.pool.name for each in pool_commands(two, where="f")] == ["p0"]
    with pytest.raises(UserError, match=r"^f: no pool 'p7'; choose one of p0, p1"):
        pool_commands(two, where="f", pool="p7")
    with pytest.raises(UserError, match=r"^f: pools: pool p1 has engine: emulated; set engine: vllm"):
        pool_commands(two, where="f", pool="p1")


def test_a_store_is_told_by_the_address_that_the_stack_fixes() -> None:
    shared = {"offload": {"mode": "shared"}}
    (tcp,) = pool_commands(stack(shared, listen="127.0.0.1:7420"), where="f")
    assert '"address":"127.0.0.1:7420"' in str(tcp.command.argv)
    assert tcp.notes[1] == (
        "the store must answer at 127.0.0.1:7420; export KVHEARTH_STORE_PASSWORD first if it asks for one"
    )
    (unix,) = pool_commands(stack(shared, listen=None, unix="/run/kv.sock"), where="f")
    assert '"address":"unix:/run/kv.sock"' in str(unix.command.argv)
    with pytest.raises(UserError, match=r"^f: store\.listen: the store has no fixed address .*; set one with a port"):
        pool_commands(stack(shared), where="f")


def test_a_store_that_runs_elsewhere_is_told_as_it_is_with_its_copies() -> None:
    shared = {"offload": {"mode": "shared"}}
    (ring,) = pool_commands(stack(shared, address="a:7420,b:7420", copies=2), where="f")
    assert '"address":"a:7420,b:7420"' in str(ring.command.argv)
    assert '"copies":2' in str(ring.command.argv)
    (one,) = pool_commands(stack(shared, address="dns:store:7420"), where="f")
    assert "copies" not in str(one.command.argv)


def test_on_a_cpu_the_script_that_does_not_run_is_told_of() -> None:
    cpu = {"block_size": 32, "vllm": {"device": "cpu"}}
    (script,) = pool_commands(stack(cpu), where="f")
    assert "set vllm.python where that is installed" in script.notes[1]
    (module,) = pool_commands(stack({**cpu, "vllm": {"device": "cpu", "python": "/env/bin/python"}}), where="f")
    assert len(module.notes) == 1


def test_the_version_that_a_pool_insists_on_is_printed() -> None:
    (command,) = pool_commands(stack({"vllm": {"version": "0.33"}}), where="f")
    assert command.notes[0].startswith("pool p0: vLLM 0.33 (checked by its interfaces, not run in the tests)")


def test_json_has_all_that_a_program_needs() -> None:
    (command,) = pool_commands(stack({"replicas": 2, "offload": {"mode": "native"}}), where="f")
    told = json.loads(json.dumps(command.as_json()))
    assert told.pop("argv") == list(command.command.argv)
    assert told.pop("notes") == list(command.notes)
    assert told == {
        "pool": "p0",
        "replicas": 2,
        "vllm_version": "0.32",
        "offload_mode": "native",
        "env": {"PYTHONHASHSEED": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    }
