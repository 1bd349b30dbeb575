"""One router's whole configuration. Checked here, trusted everywhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from kvhearth.errors import UserError
from kvhearth.router.config.bounds import HealthChecks, Limits, Queueing, Resilience, Timeouts
from kvhearth.router.config.fleet import Disaggregation, Discovery, Tls
from kvhearth.router.config.kv import KvSettings
from kvhearth.router.config.parsing import Role, check_name, is_loopback, parse_engine_url, says
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.registry import POLICY_NAMES

MOST_RANKS = 1024
MOST_DECISIONS = 10_000
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router.

    Args:
        engines: (name, base URL) each; the URL is ``http://host:port`` or ``https://host:port``. May be empty where
            discovery finds them.
        listen_host: address to listen on; beyond loopback ``api_key`` or ``tenants_file`` is required.
        listen_port: 0 takes a free one.
        policy: name of the routing policy; None takes kv-aware where KV events are configured, else prefix.
        aliases: further names of models: alias to the name that engines know. An alias hides a model of its name.
        models: names that are served though perhaps no engine is there yet: 503 then, not 404.
        data_parallel: data-parallel ranks by engine name, each a target of its own; 1 where nothing is said.
        roles: by engine name; "both" where nothing is said.
        api_key: when set, every route except ``/health`` wants ``Authorization: Bearer <api_key>``. The header goes
            on to the engine, and health checks send it too: one key for the fleet.
        engine_key: with ``tenants_file``: what engines want as bearer token, sent instead of the tenant's key.
        salt_secret: what isolated tenants' cache salts are made from.
        admin_key: the operator's bearer token: opens ``/engines``, and where there are tenants ``/metrics`` and
            ``/debug/decision``.

    Raises:
        UserError: a value is impossible, or the listener would be open to others without a key.
    """

    engines: Sequence[tuple[str, str]] = field(
        default=(),
        metadata=says("An engine: http://host:port or name=http://host:port. Repeatable.", flag="--engine"),
    )
    listen_host: str = field(
        default="127.0.0.1",
        metadata=says("host:port; port 0 takes a free one.", flag="--listen", restart=True),
    )
    listen_port: int = field(default=8000, metadata=says("See listen_host.", restart=True))
    policy: str | None = field(default=None, metadata=says(f"One of {', '.join(POLICY_NAMES)}.", restart=True))
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    aliases: Mapping[str, str] = field(
        default_factory=dict, metadata=says("A further name of a model: alias=model. Repeatable.", flag="--alias")
    )
    models: Sequence[str] = field(
        default=(),
        metadata=says("A model that is served though no engine may be there yet. Repeatable.", flag="--model"),
    )
    data_parallel: Mapping[str, int] = field(
        default_factory=dict,
        metadata=says("Data-parallel ranks of an engine, each routed to on its own: name=ranks. Repeatable."),
    )
    roles: Mapping[str, Role] = field(
        default_factory=dict,
        metadata=says("What an engine does: name=prefill, decode or both. Repeatable.", flag="--role"),
    )
    session_header: str = field(
        default="x-session-id", metadata=says("Policy session: the header whose value keeps requests together.")
    )
    decisions_kept: int = field(default=64, metadata=says("Decisions that /debug/decision can explain.", restart=True))
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: HealthChecks = field(default_factory=HealthChecks)
    queue: Queueing = field(default_factory=Queueing)
    resilience: Resilience = field(default_factory=Resilience)
    discovery: Discovery = field(default_factory=Discovery)
    disaggregation: Disaggregation = field(default_factory=Disaggregation)
    tls: Tls = field(default_factory=Tls)
    tenants_file: Path | None = field(
        default=None,
        metadata=says(
            "YAML file of tenants: their keys' digests and limits. Read again when it changes.", restart=True
        ),
    )
    api_key: str | None = field(default=None, repr=False, metadata=says("Key that clients must send.", restart=True))
    engine_key: str | None = field(default=None, repr=False, metadata=says("Key that engines want.", restart=True))
    admin_key: str | None = field(default=None, repr=False, metadata=says("Key of the operator.", restart=True))
    salt_secret: bytes = field(default=b"", repr=False, metadata=says("Secret of tenants' cache salts.", restart=True))

    def __post_init__(self) -> None:
        self._check_engines()
        self._check_listeners()
        self._check_names({name for name, _ in self.engines})
        if self.policy_name not in POLICY_NAMES:
            remedy = f"use one of {', '.join(POLICY_NAMES)}"
            raise UserError(f"unknown policy {self.policy!r}", where="policy", remedy=remedy)
        if self.policy_name == KvAware.name and not self.kv.events and not self.discovery.is_used:
            remedy = "say where they come from (--kv-events), or use prefix"
            raise UserError("kv-aware needs the engines' KV events", where="policy", remedy=remedy)

    @property
    def policy_name(self) -> str:
        """The policy, also where none was named."""
        if self.policy is not None:
            return self.policy
        return KvAware.name if self.kv.events or self.discovery.kv_events_port else Prefix.name

    @property
    def key_for_engines(self) -> str | None:
        """What the router sends to engines on its own account, and for tenants."""
        return self.api_key if self.tenants_file is None else self.engine_key

    def _check_engines(self) -> None:
        if not self.engines and not self.discovery.is_used:
            raise UserError("no engine given", where="engines", remedy="name at least one, as http://host:port")
        names = [name for name, _ in self.engines]
        for name in names:
            check_name(name)
            if names.count(name) > 1:
                raise UserError(f"{name!r} is there twice", where="engines", remedy="give each engine its own name")
        for name, url in self.engines:
            parse_engine_url(url, where=f"engine {name}")

    def _check_listeners(self) -> None:
        if not 0 <= self.listen_port <= 65535:
            raise UserError(f"port {self.listen_port} does not exist", where="listen", remedy="use 0 to 65535")
        for name in ("api_key", "engine_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not (key and key.isascii() and key.isprintable()):
                raise UserError("the key is empty or not printable ASCII", where=name, remedy="set a printable key")
        if self.api_key is not None and self.tenants_file is not None:
            raise UserError("one key for all, and tenants with keys", where="tenants_file", remedy="use one of the two")
        if self.api_key is None and self.tenants_file is None and not is_loopback(self.listen_host):
            raise UserError(
                f"{self.listen_host} is reachable from other machines and there is no API key",
                where="listen",
                remedy="set KVHEARTH_ROUTER_API_KEY, an API key file or a tenants file, or listen on 127.0.0.1",
            )

    def _check_names(self, engines: set[str]) -> None:
        named_engines: tuple[tuple[str, Mapping[str, object]], ...] = (
            ("kv events", self.kv.events),
            ("data parallel", self.data_parallel),
            ("role", self.roles),
        )
        for where, named in named_engines:
            for name in named:
                if name not in engines:
                    known = ", ".join(sorted(engines)) or "an engine first"
                    raise UserError(f"there is no engine {name!r}", where=where, remedy=f"name one of {known}")
        for name, ranks in self.data_parallel.items():
            if not 1 <= ranks <= MOST_RANKS:
                raise UserError(f"{ranks} ranks", where=f"data parallel, {name}", remedy=f"use 1 up to {MOST_RANKS}")
        for name, role in self.roles.items():
            if role not in get_args(Role):
                remedy = f"use one of {', '.join(get_args(Role))}"
                raise UserError(f"{role!r} is no role", where=f"role, {name}", remedy=remedy)
        for alias, model in self.aliases.items():
            if not alias or not model or model in self.aliases:
                raise UserError(
                    f"{alias!r} means {model!r}", where="alias", remedy="give name=model, no alias of an alias"
                )
        if not _TOKEN.fullmatch(self.session_header):
            raise UserError(
                f"{self.session_header!r} cannot name a header",
                where="session header",
                remedy="use one as x-session-id",
            )
        if not 1 <= self.decisions_kept <= MOST_DECISIONS:
            raise UserError(str(self.decisions_kept), where="decisions kept", remedy=f"use 1 up to {MOST_DECISIONS}")
