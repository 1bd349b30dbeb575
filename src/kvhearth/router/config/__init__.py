"""What a router is told: engines, policy, bounds, deadlines, keys. Checked here, trusted everywhere else."""

from kvhearth.router.config.bounds import MIB, HealthChecks, Limits, Queueing, Resilience, Timeouts
from kvhearth.router.config.fleet import Disaggregation, Discovery, Tls
from kvhearth.router.config.kv import EventSource, KvSettings
from kvhearth.router.config.parsing import Role, is_loopback, parse_engine_url, parse_listen
from kvhearth.router.config.router import RouterConfig

__all__ = [
    "MIB",
    "Disaggregation",
    "Discovery",
    "EventSource",
    "HealthChecks",
    "KvSettings",
    "Limits",
    "Queueing",
    "Resilience",
    "Role",
    "RouterConfig",
    "Timeouts",
    "Tls",
    "is_loopback",
    "parse_engine_url",
    "parse_listen",
]
