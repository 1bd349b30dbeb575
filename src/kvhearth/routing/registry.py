"""Policies by name, for whoever reads a name from a flag or a Stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvhearth.errors import UserError
from kvhearth.routing.policies.kv_aware import KvAware, KvAwareSettings
from kvhearth.routing.policies.least_loaded import LeastLoaded
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.policies.random_choice import RandomChoice
from kvhearth.routing.policies.round_robin import RoundRobin
from kvhearth.routing.policies.session import Session, SessionSettings
from kvhearth.routing.ports import Holders, Policy
from kvhearth.routing.ttft import Predictor


@dataclass(frozen=True, slots=True)
class KvParts:
    """What kv-aware works with: the KV index, a predictor, the source of its draws between equals, and settings."""

    holders: Holders
    predictor: Predictor = field(default_factory=Predictor)
    rng: Random = field(default_factory=Random)
    settings: KvAwareSettings = field(default_factory=KvAwareSettings)


POLICY_NAMES = tuple(
    sorted(policy.name for policy in (KvAware, LeastLoaded, Prefix, RandomChoice, RoundRobin, Session))
)


def make_policy(
    name: str,
    prefix: PrefixSettings | None = None,
    *,
    session: SessionSettings | None = None,
    kv: KvParts | None = None,
    rng: Random | None = None,
) -> Policy:
    """A fresh policy with no memory.

    Args:
        name: one of `POLICY_NAMES`.
        prefix: settings for ``prefix``.
        session: settings for ``session``.
        kv: what ``kv-aware`` works with.
        rng: where ``random`` draws from.

    Raises:
        UserError: no policy has this name, or it is ``kv-aware`` and there is no KV index.
    """
    makers: dict[str, Callable[[], Policy]] = {
        KvAware.name: lambda: _kv_aware(kv),
        LeastLoaded.name: LeastLoaded,
        Prefix.name: lambda: Prefix(prefix),
        RandomChoice.name: lambda: RandomChoice(rng),
        RoundRobin.name: RoundRobin,
        Session.name: lambda: Session(session),
    }
    maker = makers.get(name)
    if maker is None:
        raise UserError(f"unknown policy {name!r}", where="policy", remedy=f"use one of {', '.join(POLICY_NAMES)}")
    return maker()


def _kv_aware(kv: KvParts | None) -> Policy:
    if kv is None:
        raise UserError(
            "kv-aware needs the engines' KV events", where="policy", remedy="name where they come from, or use prefix"
        )
    return KvAware(kv.holders, kv.predictor, kv.rng, kv.settings)
