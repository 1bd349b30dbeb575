"""One way to a store, be it a node or a ring of them."""

from __future__ import annotations

from typing import Any, TypeAlias

from kvhearth.errors import UserError
from kvhearth.store.client.client import StoreClient
from kvhearth.store.ring.client import StoreRing
from kvhearth.store.ring.members import Members

AnyStore: TypeAlias = StoreClient | StoreRing
"""Either answers the same calls."""


def open_store(
    address: str, *, copies: int = 1, timeout_seconds: float = 1.0, where: str = "address", **client_settings: Any
) -> AnyStore:
    """The client of what ``address`` names.

    Args:
        address: one node (``host:port``, ``unix:/path``), or a ring: several with commas between, ``file:/path``, or
            ``dns:name:port`` (see `Members`).
        copies: nodes that keep each row, 1 or 2; of one node 1.
        timeout_seconds: how long a call may take in all, unless it says otherwise.
        where: the field that named the address, for errors.
        client_settings: for each node's `StoreClient`.

    Raises:
        UserError: a part of the address makes no sense, or ``copies`` does not. A node that is away is no error.
    """
    members = members_of(address, copies, where=where)

    def connect(node: str) -> StoreClient:
        return StoreClient(node, timeout_seconds=timeout_seconds, **client_settings)

    if not members.is_live and len(members.nodes) == 1:
        return connect(members.nodes[0])
    return StoreRing(members, connect, copies=copies, timeout_seconds=timeout_seconds)


def members_of(address: str, copies: int = 1, *, where: str = "address") -> Members:
    """The nodes that ``address`` names; connects to none.

    Raises:
        UserError: as `open_store`.
    """
    members = Members(address, where=where)
    if isinstance(copies, bool) or copies not in (1, 2):
        raise UserError(f"{copies} copies", where="copies", remedy="give 1 or 2")
    if not members.is_live and copies > len(members.nodes):
        raise UserError(
            f"{copies} copies of each row cannot be kept on {len(members.nodes)} node",
            where="copies",
            remedy="name more nodes, or give 1",
        )
    return members
