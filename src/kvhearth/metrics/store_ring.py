"""The metrics of a ring of store nodes, on the side of whoever calls it; ``node`` is the node's name in the ring."""

from __future__ import annotations

from kvhearth.metrics.spec import Kind, Metric

RING_NODES = Metric("kvhearth_store_ring_nodes", Kind.GAUGE, "", "Nodes that are members of the ring.")
RING_NODE_UP = Metric(
    "kvhearth_store_ring_node_up",
    Kind.GAUGE,
    "",
    "Whether a node is asked (1), or passed over because recent calls failed (0).",
    ("node",),
)
RING_NODE_CALLS = Metric(
    "kvhearth_store_ring_node_calls",
    Kind.COUNTER,
    "",
    "Keys and rows asked of a node by operation and outcome.",
    ("node", "operation", "outcome"),
)
RING_CHANGES = Metric("kvhearth_store_ring_changes", Kind.COUNTER, "", "Changes of the ring's members.")
RING_COPIES_LOST = Metric(
    "kvhearth_store_ring_copies_lost",
    Kind.COUNTER,
    "",
    "Rows that were stored on fewer nodes than they should have been.",
)
RING_FOUND_ELSEWHERE = Metric(
    "kvhearth_store_ring_found_elsewhere",
    Kind.COUNTER,
    "",
    "Rows that came from another node than the first asked: the other copy, or where the key was before a change.",
)
RING_REPAIRS = Metric(
    "kvhearth_store_ring_repairs",
    Kind.COUNTER,
    "",
    "Rows put back where they were missing, by outcome (ok, failed, dropped for want of room).",
    ("outcome",),
)
