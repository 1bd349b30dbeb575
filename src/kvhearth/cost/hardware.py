"""What a GPU and a link are to the cost model: plain figures, filled in by the catalog or by hand."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        hbm_bytes: HBM by the data sheet (decimal bytes).
        device_bytes: what the driver reports as total memory, the base of vLLM's ``gpu_memory_utilization``.
        hbm_bandwidth: bytes/s.
        bf16_flops: dense BF16 FLOP/s.
        fp8_flops: dense FP8 FLOP/s; 0 where the chip has none.
        host_bandwidth: bytes/s per direction between host memory and HBM, by the data sheet.
        peer_bandwidth: bytes/s per direction between GPUs of one machine (NVLink, xGMI); 0 = over the host link.
        linear_mfu: share of peak FLOP/s that matrix products reach in prefill.
        attention_mfu: share of BF16 peak FLOP/s that prefill attention reaches.
        mbu: share of HBM bandwidth that reading weights and KV reaches.
        step_overhead_ns: fixed time of a step, independent of what is in it.
    """

    name: str
    hbm_bytes: int
    device_bytes: int
    hbm_bandwidth: float
    bf16_flops: float
    fp8_flops: float
    host_bandwidth: float
    peer_bandwidth: float
    linear_mfu: float
    attention_mfu: float
    mbu: float
    step_overhead_ns: int


@dataclass(frozen=True, slots=True)
class Link:
    """A way that KV bytes take.

    Attributes:
        bandwidth: bytes/s in one direction. For a host link the data sheet's figure, of which the operation-size curve
            takes its share; otherwise what is reached with ``ops_in_flight`` operations under way.
        latency_ns: time of one operation beside its bytes (round trip, seek, request handling).
        ops_in_flight: operations under way at once, whose latencies overlap.
        host: a host↔HBM copy, to which the operation-size curve applies.
    """

    name: str
    bandwidth: float
    latency_ns: int = 0
    ops_in_flight: int = 1
    host: bool = False
