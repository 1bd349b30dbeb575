"""The parts vLLM asks for: refused with a reason where they cannot work, and nothing left in shared memory."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvhearth.connector import HearthConnector, HearthOffloadingSpec, region, spec
from kvhearth.connector.region import region_path
from kvhearth.connector.stats import CONNECTOR_DEFINITIONS, DEFINITIONS
from kvhearth.errors import UserError

from .rig import BLOCK, Rig, tokens

STORE = {"type": "StoreTier", "module_path": "kvhearth.connector", "address": "127.0.0.1:1", "weights": "w"}


def with_settings(rig: Rig, extra: dict[str, Any]) -> tuple[Any, str]:
    """The configuration of an engine like this one, with other settings; and its id."""
    config, engine_id = copy.copy(rig.config), name()
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.engine_id = engine_id
    known = config.kv_transfer_config.kv_connector_extra_config
    config.kv_transfer_config.kv_connector_extra_config = {**known, **extra}
    return config, engine_id


def name() -> str:
    """An engine's id."""
    return f"spec-{uuid.uuid4().hex}"


def test_once_everybody_has_the_region_its_name_is_gone_and_it_works() -> None:
    engine_id = name()
    with Rig(engine_id=engine_id) as rig:
        assert not region_path(engine_id).exists()
        prompt = tokens(1, 8 * BLOCK + 1)
        rig.run("a", prompt)
        rig.forget_hbm()
        assert rig.run("b", prompt) == 8 * BLOCK


def test_an_engine_that_ends_leaves_no_file_and_no_thread() -> None:
    threads, engine_id = set(threading.enumerate()), name()
    rig = Rig(engine_id=engine_id)
    rig.run("a", tokens(1, 5 * BLOCK))
    rig.close()

    assert not region_path(engine_id).exists()
    assert not [each.name for each in set(threading.enumerate()) - threads if each.name.startswith("kvhearth")]


def test_an_engine_killed_outright_leaves_no_file() -> None:
    engine_id = name()
    code = (
        f"from tests.vllm.rig import Rig; import time; rig = Rig(engine_id={engine_id!r});"
        "print('up', flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    give_up = threading.Timer(100, process.kill)
    give_up.start()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    finally:
        give_up.cancel()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

    assert not region_path(engine_id).exists()


def test_what_an_engine_killed_while_it_started_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it joined, the engine would wait for it to grow, or share memory with nobody knows whom."""
    engine_id = name()
    region_path(engine_id).write_bytes(b"half made")
    monkeypatch.setattr(region, "_started_at", lambda pid: time.time())
    try:
        with Rig(engine_id=engine_id) as rig:
            rig.run("a", tokens(1, 3 * BLOCK))
    finally:
        region_path(engine_id).unlink(missing_ok=True)


def test_dram_for_less_than_two_chunks_is_refused_by_the_field_to_change() -> None:
    with pytest.raises(UserError, match=r"cpu_bytes_to_use: .* hold 1 chunks of .*raise it"):
        Rig(dram_chunks=1)


def test_too_little_shared_memory_is_told_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_id = name()
    monkeypatch.setattr(region.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 10))
    with pytest.raises(UserError, match=r"cpu_bytes_to_use: .* for KV in DRAM, but /dev/shm has 64 KiB free; lower it"):
        Rig(engine_id=engine_id)

    assert not region_path(engine_id).exists()


@pytest.mark.parametrize("key", ["dram_admission", "snapshot_listen"])
def test_a_setting_that_makes_no_sense_is_refused_and_leaves_nothing(key: str) -> None:
    engine_id, threads = name(), set(threading.enumerate())
    with pytest.raises(UserError, match=key):
        Rig(engine_id=engine_id, extra={key: "sometimes"})

    assert not region_path(engine_id).exists()
    assert not [each.name for each in set(threading.enumerate()) - threads if each.name.startswith("kvhearth")]


@pytest.mark.parametrize("setting", [{"pool": 7}, {"pol": "x"}, {"connections": 0}, {"address": "nowhere"}])
def test_a_setting_of_the_store_that_makes_no_sense_is_refused_and_leaves_nothing(setting: dict[str, Any]) -> None:
    engine_id, threads = name(), set(threading.enumerate())
    with pytest.raises(UserError, match=next(iter(setting))):
        Rig(engine_id=engine_id, store="127.0.0.1:1", tier=setting)

    assert not region_path(engine_id).exists()
    assert not [each.name for each in set(threading.enumerate()) - threads if each.name.startswith("kvhearth")]


def test_two_stores_are_one_too_many() -> None:
    engine_id, threads = name(), set(threading.enumerate())
    with pytest.raises(UserError, match=r"secondary_tiers: 2 StoreTiers; give an engine one store"):
        Rig(engine_id=engine_id, extra={"secondary_tiers": [STORE, STORE]})

    assert not region_path(engine_id).exists()
    assert not [each.name for each in set(threading.enumerate()) - threads if each.name.startswith("kvhearth")]


def test_another_spec_under_our_connector_is_refused_with_the_flags_to_give() -> None:
    with Rig() as rig:
        config, engine_id = with_settings(rig, {"spec_name": "TieringOffloadingSpec", "spec_module_path": None})
        with pytest.raises(UserError) as refused:
            HearthConnector(config, KVConnectorRole.SCHEDULER, rig.kv_cache_config)

    assert refused.value.where == "kv_connector_extra_config.spec_name"
    assert "TieringOffloadingSpec" in refused.value.what
    assert "HearthOffloadingSpec" in refused.value.remedy
    region_path(engine_id).unlink(missing_ok=True)  # upstream's own, made before we are asked


def test_a_store_under_another_connector_is_refused_with_the_flags_to_give() -> None:
    """Upstream's connector does not say whose each request is, and knows nothing of the engine's namespace."""
    with Rig() as rig:
        config, engine_id = with_settings(rig, {"secondary_tiers": [STORE]})
        with pytest.raises(UserError) as refused:
            OffloadingConnector(config, KVConnectorRole.SCHEDULER, rig.kv_cache_config)
        region_path(engine_id).unlink(missing_ok=True)  # upstream's own, made before we are asked

    assert refused.value.where == "--kv-transfer-config kv_connector"
    assert '"kv_connector": "HearthConnector"' in refused.value.remedy


def test_a_worker_that_cannot_be_made_leaves_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_id = name()

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no such layout")

    monkeypatch.setattr(spec, "HostOffloadingWorker", broken)
    with pytest.raises(RuntimeError, match="no such layout"):
        Rig(engine_id=engine_id)

    assert not region_path(engine_id).exists()


def test_a_connector_that_cannot_be_made_does_not_stay_in_view() -> None:
    with pytest.raises(UserError):
        Rig(dram_chunks=1)

    assert spec._view.get() is None


def test_every_metric_of_ours_is_defined_for_vllm_with_and_without_a_store() -> None:
    extra = {"cpu_bytes_to_use": 1 << 20}
    native = HearthOffloadingSpec.build_metric_definitions(extra)
    shared = HearthOffloadingSpec.build_metric_definitions({**extra, "secondary_tiers": [STORE]})

    assert set(CONNECTOR_DEFINITIONS) <= set(native)
    assert not set(DEFINITIONS) & set(native)
    assert set(CONNECTOR_DEFINITIONS) | set(DEFINITIONS) <= set(shared)


def test_the_connector_is_named_as_in_the_flags() -> None:
    import kvhearth.connector

    assert kvhearth.connector.HearthConnector is HearthConnector
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        kvhearth.connector.Nonsense


def test_shared_memory_is_left_as_it_was() -> None:
    """Of everything this module did."""
    assert not [each for each in os.listdir("/dev/shm") if each.startswith("vllm_offload_spec-")]
