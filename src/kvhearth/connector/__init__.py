"""The plug-in that vLLM loads: the real engine offloads to its DRAM and to the shared store.

vLLM finds the classes here by name (``kv_connector_module_path``, ``spec_module_path``, a tier's ``module_path``). They
are imported when asked for, so that the room's plain modules need neither vLLM nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "HearthConnector": "kvhearth.connector.connector",
    "HearthOffloadingSpec": "kvhearth.connector.spec",
    "StoreTier": "kvhearth.connector.tier",
}

__all__ = ["HearthConnector", "HearthOffloadingSpec", "StoreTier"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
