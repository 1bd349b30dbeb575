"""vLLM finds the connector by its name in every process of an engine, without further flags."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvhearth.connector import HearthConnector, HearthOffloadingSpec, StoreTier
from kvhearth.connector.plugin import register

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_all_three_are_known_by_name_once_registered_and_registering_again_is_fine() -> None:
    register()
    register()
    transfer = KVTransferConfig(kv_connector="HearthConnector", kv_role="kv_both")

    assert KVConnectorFactory.get_connector_class(transfer) is HearthConnector
    assert OffloadingSpecFactory._registry["HearthOffloadingSpec"]() is HearthOffloadingSpec
    assert SecondaryTierFactory._registry["StoreTier"]() is StoreTier


def test_the_entry_point_that_vllm_looks_for_is_declared_and_installed() -> None:
    declared = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]["vllm.general_plugins"]
    installed = {point.name: point for point in entry_points(group="vllm.general_plugins")}

    assert declared == {"kvhearth": "kvhearth.connector.plugin:register"}
    assert installed["kvhearth"].load() is register


def test_vllm_itself_registers_them() -> None:
    for registry in (KVConnectorFactory._registry, OffloadingSpecFactory._registry, SecondaryTierFactory._registry):
        for name in ("HearthConnector", "HearthOffloadingSpec", "StoreTier"):
            registry.pop(name, None)
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    load_general_plugins()

    assert "HearthConnector" in KVConnectorFactory._registry
    assert "HearthOffloadingSpec" in OffloadingSpecFactory._registry
    assert "StoreTier" in SecondaryTierFactory._registry
