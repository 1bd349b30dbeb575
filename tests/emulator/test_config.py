"""An engine that cannot exist is refused before it takes a port, naming the setting and the way out."""

from __future__ import annotations

import pytest

from kvhearth.emulator.config import EmulatorConfig, shape_of
from kvhearth.emulator.serve import Emulator
from kvhearth.engine import OffloadMode
from kvhearth.errors import UserError


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"time_scale": 0}, "time_scale"),
        ({"time_scale": float("nan")}, "time_scale"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"port": 70_000}, "port"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
        ({"offload_mode": OffloadMode.SHARED}, "store"),
        ({"store": "127.0.0.1:1"}, "store"),
        ({"host": "0.0.0.0"}, "API_KEY"),
        ({"api_key": ""}, "api_key"),
        ({"model": "llama-9"}, "llama-9"),
        ({"gpu": "h9000"}, "h9000"),
        ({"model": "llama-3.1-70b"}, "does not fit"),
        ({"store_link": "pigeon"}, "pigeon"),
        ({"num_gpu_blocks_override": 101, "max_model_len": 1601}, "max_model_len"),
        ({"offload_mode": OffloadMode.NATIVE, "dram_bytes": 1}, "dram_bytes"),
        ({"offload_mode": OffloadMode.SHARED, "store": "nowhere"}, "store"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_an_impossible_setting_is_named(settings, names: str) -> None:
    with pytest.raises(UserError, match=names):
        Emulator(EmulatorConfig(**{"model": "llama-3.1-8b", "port": 0, **settings}))


def test_one_block_stays_empty_as_in_vllm() -> None:
    shape = shape_of(EmulatorConfig("llama-3.1-8b", num_gpu_blocks_override=101))
    assert shape.engine.num_blocks == 100
    assert shape.limits.max_model_len == 1600


def test_without_an_override_hbm_gives_the_blocks() -> None:
    config = EmulatorConfig("llama-3.1-8b")
    shape = shape_of(config)
    assert shape.engine.num_blocks == shape.cost.hbm_kv_blocks(config.gpu_memory_utilization) - 1
    assert shape.limits.max_model_len == 131_072


def test_engines_of_different_shape_do_not_share_keys_in_the_store() -> None:
    settings = [{}, {"block_size": 32}, {"blocks_per_chunk": 4}, {"model": "qwen3-8b"}, {"store_bytes_scale": 64}]
    spaces = {shape_of(EmulatorConfig(**{"model": "llama-3.1-8b", **setting})).namespace for setting in settings}
    assert len(spaces) == len(settings)


def test_beyond_loopback_is_allowed_with_a_key() -> None:
    assert EmulatorConfig("llama-3.1-8b", host="0.0.0.0", api_key="secret").host == "0.0.0.0"
