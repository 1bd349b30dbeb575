"""How KV is cut up: over ranks by parallelism, and into copy operations by the vLLM version's memory layout."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvhearth.cost.model import Model
from kvhearth.errors import UserError

GATHER_KERNEL_SINCE = (0, 29)
"""From the layer-outermost layout on, vLLM loads pages below 28 KiB by one gather kernel, larger ones by batched copies
(vLLM 0.32 source). It would not switch there if batched copies were slower, so the kernel's speed is the least."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Ranks of one engine: ``tp`` splits heads and matrices, ``pp`` splits layers.

    Raises:
        UserError: a degree below 1.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for field, value in (("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise UserError(f"{value} ranks", where=f"parallelism.{field}", remedy="give 1 or more")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def check_split(model: Model, parallelism: Parallelism) -> None:
    """Refuse a split that vLLM refuses.

    Raises:
        UserError: heads that do not divide over ``tp``, or fewer layers than ``pp``.
    """
    tp, pp = parallelism.tp, parallelism.pp
    if model.q_heads % tp:
        raise UserError(
            f"{model.name} has {model.q_heads} attention heads, which {tp} ranks do not divide",
            where="parallelism.tp",
            remedy=f"choose a divisor of {model.q_heads}",
        )
    if not model.is_mla and model.kv_heads % tp and tp % model.kv_heads:
        raise UserError(
            f"{model.name} has {model.kv_heads} KV heads: {tp} neither divides them nor is a multiple of them",
            where="parallelism.tp",
            remedy=f"choose a divisor or a multiple of {model.kv_heads}",
        )
    if pp > model.layers:
        raise UserError(
            f"{model.name} has {model.layers} layers for {pp} stages",
            where="parallelism.pp",
            remedy=f"choose at most {model.layers}",
        )


def parse_vllm_version(version: str) -> tuple[int, int]:
    """``"0.32.0+cpu"`` → ``(0, 32)``.

    Raises:
        UserError: no leading ``major.minor``.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:\D|$)", version)
    if match is None:
        raise UserError(f"{version!r} is no version", where="vllm_version", remedy='write it like "0.32" or "0.32.0"')
    return int(match[1]), int(match[2])


def copy_op_bytes(layer_page_bytes: int, layers: int, is_mla: bool, version: tuple[int, int]) -> int:
    """Contiguous bytes of one host↔HBM copy operation on one rank.

    Args:
        layer_page_bytes: one block of one layer on one rank, K and V together.
        layers: layers of one rank that share the block.
        is_mla: one latent tensor instead of K and V.
        version: vLLM ``(major, minor)``.

    Before 0.12 K and V of each layer lie apart; 0.12 to 0.28 keep one block of all layers together; from 0.29 on the
    layer is outermost and the unit is one layer's page. Source: vLLM blog 2026-01-08 (block sizes before and after
    0.12), vLLM release notes and 0.32 source (0.29).
    """
    if version < (0, 12):
        return layer_page_bytes if is_mla else layer_page_bytes // 2
    if version < (0, 29):
        return layer_page_bytes * layers
    return layer_page_bytes
