"""What a deployment is: the Stack, its YAML form and its JSON schema. Nothing here starts or connects to anything."""

from kvhearth.stack.fit import check_catalog
from kvhearth.stack.loading import parse_stack, stack_of, stack_schema
from kvhearth.stack.spec import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    Emulator,
    Engine,
    Mode,
    Offload,
    PolicyName,
    Pool,
    Router,
    Stack,
    Store,
)
from kvhearth.stack.vllm import Vllm

__all__ = [
    "DEFAULT_GPU_MEMORY_UTILIZATION",
    "Emulator",
    "Engine",
    "Mode",
    "Offload",
    "PolicyName",
    "Pool",
    "Router",
    "Stack",
    "Store",
    "Vllm",
    "check_catalog",
    "parse_stack",
    "stack_of",
    "stack_schema",
]
