"""Engines that differ in anything KV depends on never share; those that do not differ have equal keys everywhere."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvhearth.connector.fingerprint import fingerprint, refuse_random_seed
from kvhearth.connector.namespace import Namespace
from kvhearth.errors import UserError

from .rig import BLOCK, Rig, tokens
from .servers import StoreProcess

PROMPT = tokens(1, 10 * BLOCK + 3)


@pytest.fixture(scope="module")
def engine() -> Any:
    """Configurations of one engine."""
    with Rig() as rig:
        return rig.config, rig.kv_cache_config


def of(config: Any, kv_cache_config: Any, **more: Any) -> Namespace:
    return fingerprint(
        config, kv_cache_config, **{"agnostic": False, "weights": "w", "epoch": "", "isa": "avx2", **more}
    )


def _changed(config: Any, part: str, name: str, value: Any) -> Any:
    config = copy.copy(config)
    setattr(config, part, copy.copy(getattr(config, part)))
    setattr(getattr(config, part), name, value)
    return config


def _rope(config: Any, value: dict[str, Any]) -> Any:
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    config.model_config.hf_config.rope_parameters = value
    return config


def _chunks(config: Any, blocks: int) -> Any:
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, "blocks_per_chunk": blocks}
    config = copy.copy(config)
    config.kv_transfer_config = transfer
    return config


MATRIX: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "dtype": ("dtype", lambda c: _changed(c, "model_config", "dtype", "torch.float16")),
    "KV dtype": ("kv_cache_dtype", lambda c: _changed(c, "cache_config", "cache_dtype", "fp8")),
    "quantization": ("quantization", lambda c: _changed(c, "model_config", "quantization", "awq")),
    "RoPE scaling": ("rope", lambda c: _rope(c, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})),
    "RoPE base": ("rope", lambda c: _rope(c, {"rope_type": "default", "rope_theta": 500000.0})),
    "longest request": ("rope", lambda c: _changed(c, "model_config", "max_model_len", 4096)),
    "layout": ("kv_layout", lambda c: _changed(c, "cache_config", "kv_cache_layout", "BLHNC")),
    "TP": ("parallelism", lambda c: _changed(c, "parallel_config", "tensor_parallel_size", 2)),
    "PP": ("parallelism", lambda c: _changed(c, "parallel_config", "pipeline_parallel_size", 2)),
    "block size": ("block_size", lambda c: _changed(c, "cache_config", "block_size", 32)),
    "chunk size": ("blocks_per_chunk", lambda c: _chunks(c, 4)),
    "hash algorithm": ("hash", lambda c: _changed(c, "cache_config", "prefix_caching_hash_algo", "sha256")),
}


@pytest.mark.parametrize("change", MATRIX)
def test_engines_that_differ_have_different_keys_and_are_told_in_what(change: str, engine: Any) -> None:
    config, kv_cache_config = engine
    field, alter = MATRIX[change]
    mine, other = of(config, kv_cache_config), of(alter(config), kv_cache_config)
    assert mine.digest() != other.digest()
    assert field in mine.differences(other)


def test_weights_epoch_instruction_set_and_lora_are_part_of_the_key(engine: Any) -> None:
    mine = of(*engine)
    digests = {
        mine.digest(),
        of(*engine, weights="v").digest(),
        of(*engine, epoch="1").digest(),
        of(*engine, isa="avx512f").digest(),
        mine.digest(lora="adapter"),
        mine.with_epoch("2").digest(),
    }
    assert len(digests) == 6


def test_seed_of_the_hash_is_part_of_the_key(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    without = of(*engine).digest()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert of(*engine).digest() != without


def test_canonical_layout_shares_across_tensor_parallelism(engine: Any) -> None:
    config, kv_cache_config = engine
    wider = _changed(config, "parallel_config", "tensor_parallel_size", 4)
    assert of(config, kv_cache_config, agnostic=True).digest() == of(wider, kv_cache_config, agnostic=True).digest()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_with_a_random_seed_are_refused_with_the_remedy(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match=r"--prefix-caching-hash-algo: .*PYTHONHASHSEED=0 .*, or use sha256_cbor"):
        refuse_random_seed(algorithm)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    refuse_random_seed(algorithm)


def test_weights_are_told_from_their_files(engine: Any, tmp_path: Path) -> None:
    config, kv_cache_config = engine
    config = _changed(config, "model_config", "model", str(tmp_path))
    load = SimpleNamespace(load_format="auto")
    config.load_config = load
    with pytest.raises(UserError, match="holds no weight files; name them there"):
        of(config, kv_cache_config, weights="")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = of(config, kv_cache_config, weights="").fields["weights"]
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert of(config, kv_cache_config, weights="").fields["weights"] != first


def test_rigs_with_other_weights_do_not_share(store: StoreProcess) -> None:
    with Rig(store=store.address, weights="one") as rig:
        rig.run("a", PROMPT)
    with Rig(store=store.address, weights="two") as rig:
        assert rig.run("a", PROMPT) == 0


def test_engines_of_a_pool_that_differ_are_told(store: StoreProcess, caplog: pytest.LogCaptureFixture) -> None:
    with Rig(store=store.address, tier={"pool": "p"}) as rig:
        rig.run("a", PROMPT)
        with Rig(store=store.address, tier={"pool": "p"}, blocks_per_chunk=2) as other:
            other.run("a", PROMPT)
            assert "they differ in blocks_per_chunk ('2' here, '1' there)" in caplog.text
            assert other.stats["kvhearth_connector_pool_mismatch{blocks_per_chunk}"] == 1


def test_engines_of_a_pool_that_hash_otherwise_are_refused(store: StoreProcess) -> None:
    def old(config: Any) -> None:
        config.cache_config.prefix_caching_hash_algo = "sha256"

    with Rig(store=store.address, tier={"pool": "p"}) as rig:
        rig.run("a", PROMPT)
        with pytest.raises(
            UserError, match=r"hash is 'sha256' here and 'sha256_cbor' in the other engines .* same --pre"
        ):
            Rig(store=store.address, tier={"pool": "p"}, tweak=old)


@pytest.mark.timeout(300)
def test_keys_are_equal_in_every_process(store: StoreProcess) -> None:
    """With and without a seed for Python's own hashes, as long as all have the same."""
    script = (
        "import sys; sys.path.append(sys.argv[1])\n"
        "from rig import Rig, tokens\n"
        "with Rig(store=sys.argv[2]) as rig:\n"
        "    rig.run('a', tokens(1, 163))\n"
        "    print(b','.join(rig.tier._admission.known).hex())\n"
    )
    ran = []
    for seed in (None, None, "0", "0"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        env |= {"PYTHONHASHSEED": seed} if seed is not None else {}
        argv = [sys.executable, "-c", script, str(Path(__file__).parent), store.address]
        ran.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    names = [process.communicate(timeout=200)[0].splitlines()[-1] for process in ran]
    assert names[0] == names[1] != names[2] == names[3]
