"""Policies by name, for whoever reads a name from a flag or a Stack."""

from __future__ import annotations

from collections.abc import Callable

from kvhearth.errors import UserError
from kvhearth.routing.policies.least_loaded import LeastLoaded
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.policies.round_robin import RoundRobin
from kvhearth.routing.ports import Policy

_MAKERS: dict[str, Callable[[PrefixSettings | None], Policy]] = {
    Prefix.name: Prefix,
    LeastLoaded.name: lambda _: LeastLoaded(),
    RoundRobin.name: lambda _: RoundRobin(),
}

POLICY_NAMES = tuple(sorted(_MAKERS))


def make_policy(name: str, prefix: PrefixSettings | None = None) -> Policy:
    """A fresh policy with no memory.

    Args:
        name: one of `POLICY_NAMES`.
        prefix: settings for ``prefix``; the others have none.

    Raises:
        UserError: no policy has this name.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        raise UserError(f"unknown policy {name!r}", where="policy", remedy=f"use one of {', '.join(POLICY_NAMES)}")
    return maker(prefix)
