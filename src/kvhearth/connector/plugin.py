"""vLLM's general-plugin entry point: makes our classes known by name in every process of an engine."""

from __future__ import annotations

import contextlib


def register() -> None:
    """Register connector, spec and tier; may be called more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    for add, name in (
        (KVConnectorFactory.register_connector, "HearthConnector"),
        (OffloadingSpecFactory.register_spec, "HearthOffloadingSpec"),
        (SecondaryTierFactory.register_tier, "StoreTier"),
    ):
        with contextlib.suppress(ValueError):  # registered before
            add(name, "kvhearth.connector", name)
