"""Time to move bytes over a link, with the operation-size curve of host↔HBM copies. Knows nothing of KV."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, exp, log

from kvhearth.cost.hardware import Link

KIB = 1024
H100_HOST_COPY = (
    (32 * KIB, 7.5e9),
    (128 * KIB, 23e9),
    (512 * KIB, 39.5e9),
    (1024 * KIB, 44e9),
    (2048 * KIB, 48e9),
    (16384 * KIB, 51e9),
)
"""Operation size in bytes → bytes/s, host to GPU on an H100 (PCIe 5). [P] vLLM blog 2026-01-08."""

CURVE_HOST_BANDWIDTH = 64e9
"""Data-sheet bandwidth of the link that the curve was measured on; other links scale it. [P] NVIDIA H100 data sheet."""

OP_FLOOR_SECONDS = 3.2e-6
"""No copy operation is shorter, however fast the link. [D] from the curve: time of an operation less its bytes at
51 GB/s is 3.7, 3.1, 3.2 and 3.3 µs at 32 KB to 1 MB."""

KERNEL_COPY_BANDWIDTH = 51e9 * 68.5 / 83.4
"""Bytes/s of a gather kernel on the H100's link, whatever the page size. [D] the DMA plateau times the ratio of
kernel to DMA with both directions busy (68.5 to 83.4 GB/s, vLLM blog 2026-01-08)."""

_LOG_CURVE = tuple((log(size), log(size / rate)) for size, rate in H100_HOST_COPY)


def host_op_seconds(op_bytes: int) -> float:
    """Seconds of one host↔HBM copy of ``op_bytes`` on the H100.

    Interpolated between the measured points in the logs of size and time, so that both time and bandwidth grow with the
    size. Below the smallest point the time is that point's; above the largest the bandwidth is.
    """
    first_size, first_rate = H100_HOST_COPY[0]
    if op_bytes <= first_size:
        return first_size / first_rate
    last_size, last_rate = H100_HOST_COPY[-1]
    if op_bytes >= last_size:
        return op_bytes / last_rate
    x = log(op_bytes)
    for (x0, y0), (x1, y1) in pairwise(_LOG_CURVE):
        if x <= x1:
            return exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
    return op_bytes / last_rate


def host_bandwidth(op_bytes: int, link_bandwidth: float = CURVE_HOST_BANDWIDTH) -> float:
    """Bytes/s of host↔HBM copies in operations of ``op_bytes`` on a link of ``link_bandwidth`` (data sheet)."""
    seconds = host_op_seconds(op_bytes) * CURVE_HOST_BANDWIDTH / link_bandwidth
    return op_bytes / max(seconds, OP_FLOOR_SECONDS)


def transfer_ns(nbytes: int, link: Link, op_bytes: int) -> int:
    """Nanoseconds to move ``nbytes`` in operations of ``op_bytes`` over ``link``, alone on it.

    A host link takes ``nbytes`` over the curve's bandwidth for that operation size. Any other takes one latency, then
    the longer of its bytes and its operations' latencies with ``ops_in_flight`` of them overlapping.
    """
    if nbytes <= 0:
        return 0
    op = min(op_bytes, nbytes)
    if link.host:
        return ceil(nbytes * 1e9 / host_bandwidth(op, link.bandwidth))
    operations = -(-nbytes // op)
    waiting = (operations - 1) * link.latency_ns / link.ops_in_flight
    return link.latency_ns + ceil(max(nbytes * 1e9 / link.bandwidth, waiting))
