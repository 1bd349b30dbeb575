"""How a store decides what stays: the settings of its table."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhearth.store.policies import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class Rules:
    """How a table decides.

    Args:
        policy: name of the eviction policy (`kvhearth.store.policies.POLICY_NAMES`).
        ttl_seconds: life of a value that comes without its own; 0 for ever.
        namespace_quota_bytes, group_quota_bytes: bound of each namespace and each sharing group; 0 for none. A value is
            paid for by the namespace its key begins with and by the group in its header, that is by whoever put it
            first; those it is shared with pay nothing. Over its quota, a namespace or group loses its own worst.
        quotas: bounds of their own, by namespace (bytes) or group (int).
    """

    policy: str = DEFAULT_POLICY
    ttl_seconds: float = 0.0
    namespace_quota_bytes: int = 0
    group_quota_bytes: int = 0
    quotas: dict[bytes | int, int] = field(default_factory=dict)
