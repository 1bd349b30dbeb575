"""A clockless model of one vLLM engine: block pool, prefix cache, scheduler, and the tiers behind HBM."""

from kvhearth.engine.model import EngineModel
from kvhearth.engine.ports import (
    Counters,
    EngineConfig,
    EngineRequest,
    Finished,
    Job,
    JobDone,
    JobKind,
    KvEvent,
    KvTier,
    NoTransfers,
    OffloadMode,
    Sources,
    Step,
    StepCost,
    Transfers,
)

__all__ = [
    "Counters",
    "EngineConfig",
    "EngineModel",
    "EngineRequest",
    "Finished",
    "Job",
    "JobDone",
    "JobKind",
    "KvEvent",
    "KvTier",
    "NoTransfers",
    "OffloadMode",
    "Sources",
    "Step",
    "StepCost",
    "Transfers",
]
