"""Which of this machine's GPUs each real engine gets, so that two engines do not start on the same one."""

from __future__ import annotations

import os
from collections.abc import Set

from kvhearth.errors import UserError
from kvhearth.stack import Stack

VARIABLE = "CUDA_VISIBLE_DEVICES"


def assign_gpus(stack: Stack, *, on_cpu: Set[str], where: str) -> dict[str, str]:
    """Engine name → its GPUs, as ``CUDA_VISIBLE_DEVICES`` wants them: one a tensor-parallel rank, in order.

    Engines of pools ``on_cpu``, and of pools whose ``vllm.env`` names GPUs itself, get none. Where the variable is set
    around kvhearth, its GPUs are the ones that are handed out.

    Raises:
        UserError: that variable names too few.
    """
    around = os.environ.get(VARIABLE)
    ours = around.split(",") if around else None
    given: dict[str, str] = {}
    used = 0
    for engine in stack.engines():
        pool = engine.pool
        if pool.engine != "vllm" or pool.name in on_cpu or VARIABLE in pool.vllm.env:
            continue
        ids = range(used, used + pool.tensor_parallel_size)
        used += pool.tensor_parallel_size
        if ours is not None and used > len(ours):
            raise UserError(
                f"{engine.name} would be given GPU number {used} of {VARIABLE}={around}",
                where=where,
                remedy=f"name more GPUs in {VARIABLE}, or run fewer replicas",
            )
        given[engine.name] = ",".join(ours[i] if ours is not None else str(i) for i in ids)
    return given
