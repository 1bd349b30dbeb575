"""What `kvhearth engine-args` prints is what vLLM's own parser and configuration take, mode by mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvhearth.control.engine_args import PoolCommand, pool_commands
from kvhearth.stack import Stack
from kvhearth.stack.vllm import OWN_FLAGS, SECRET_FLAGS


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of the process look no model up; vLLM's arguments name one that is not here."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    """The parser of vLLM's server."""
    return make_arg_parser(FlexibleArgumentParser())


def command(**pool: Any) -> PoolCommand:
    described = {"name": "chat", "model": "org/model", "engine": "vllm", "block_size": 32, **pool}
    stack = Stack.model_validate({"pools": [described], "store": {"listen": "127.0.0.1:7420"}})
    return pool_commands(stack, where="f")[0]


def parsed(parser: FlexibleArgumentParser, printed: PoolCommand) -> Any:
    """The arguments behind the program's own words, as the server reads them."""
    words = printed.command.argv
    if words[0] == "vllm":
        assert words[1:3] == ("serve", "org/model")
        return parser.parse_args(["--model", *words[2:]])
    assert words[1:3] == ("-m", "vllm.entrypoints.openai.api_server")
    return parser.parse_args(list(words[3:]))


@pytest.mark.parametrize("mode", ["none", "native", "shared", "lmcache"])
@pytest.mark.parametrize("python", [None, "/env/bin/python"])
def test_every_mode_is_read_back_as_it_was_meant(mode: str, python: str | None, parser: FlexibleArgumentParser) -> None:
    offload = {"mode": mode, "dram_size": "1GiB", "blocks_per_chunk": 2}
    vllm = {"python": python, "kv_events": True, "hash_algo": "xxhash_cbor", "enforce_eager": True, "dtype": "float32"}
    args = parsed(parser, command(offload=offload, max_model_len=4096, num_gpu_blocks_override=160, vllm=vllm))
    engine = AsyncEngineArgs.from_cli_args(args)
    assert (engine.model, engine.block_size, engine.max_model_len) == ("org/model", 32, 4096)
    assert (engine.num_gpu_blocks_override, engine.enforce_eager, engine.dtype) == (160, True, "float32")
    assert (engine.prefix_caching_hash_algo, engine.shutdown_timeout) == ("xxhash_cbor", 10)
    assert (args.host, args.port, args.served_model_name) == ("127.0.0.1", 8001, ["org/model"])
    assert engine.enable_prefix_caching is True
    assert args.enable_prompt_tokens_details is True
    assert engine.kv_events_config.enable_kv_cache_events is True
    assert engine.kv_events_config.endpoint.startswith("ipc:///")  # vLLM connects to tcp://127.0.0.1
    transfer = engine.kv_transfer_config
    if mode == "none":
        assert transfer is None
        return
    assert transfer.kv_role == "kv_both"
    expected = "LMCacheConnectorV1" if mode == "lmcache" else "HearthConnector"
    assert transfer.kv_connector == expected


@pytest.mark.parametrize("mode", ["native", "shared"])
def test_vllm_finds_the_classes_that_are_named(mode: str, parser: FlexibleArgumentParser) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    args = parsed(parser, command(offload={"mode": mode}))
    transfer = AsyncEngineArgs.from_cli_args(args).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == "HearthConnector"
    import kvhearth.connector as connector

    extra = transfer.kv_connector_extra_config
    assert extra["spec_module_path"] == connector.__name__
    assert hasattr(connector, extra["spec_name"])
    for tier in extra.get("secondary_tiers", []):
        assert hasattr(connector, tier["type"])


def test_every_flag_that_the_stack_guards_is_one_of_vllms(parser: FlexibleArgumentParser) -> None:
    known = {option for action in parser._actions for option in action.option_strings}
    assert {*OWN_FLAGS, *SECRET_FLAGS} <= known


def test_every_flag_that_is_printed_is_guarded(parser: FlexibleArgumentParser) -> None:
    vllm = {"kv_events": True, "enforce_eager": True, "dtype": "float32"}
    offload = {"mode": "shared"}
    for memory in ({"num_gpu_blocks_override": 4096}, {"gpu_memory_utilization": 0.5}):
        printed = command(offload=offload, max_model_len=4096, vllm=vllm, **memory)
        flags = {word for word in printed.command.argv if word.startswith("--")}
        assert flags <= set(OWN_FLAGS)


def test_the_example_is_read(parser: FlexibleArgumentParser) -> None:
    stack = Stack.from_yaml(Path(__file__).parents[2] / "examples" / "vllm.yaml")
    (printed,) = pool_commands(stack, where="f")
    assert json.loads(json.dumps(printed.as_json()))["pool"] == "chat"
    args = parser.parse_args(["--model", *printed.command.argv[2:]])
    assert AsyncEngineArgs.from_cli_args(args).kv_transfer_config.kv_connector == "HearthConnector"
