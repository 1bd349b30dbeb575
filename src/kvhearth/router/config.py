"""What a router is told at start: addresses, policy, bounds and deadlines. Checked here, trusted everywhere else."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvhearth.errors import UserError
from kvhearth.routing.policies.kv_aware import KvAware
from kvhearth.routing.policies.prefix import Prefix, PrefixSettings
from kvhearth.routing.registry import POLICY_NAMES

MIB = 1 << 20
MOST_RANKS = 1024
MOST_DECISIONS = 10_000
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on memory and work. Beyond them a request is refused, never queued.

    Args:
        max_body_bytes: of one request body; 413 beyond.
        max_head_bytes: of one request's or response's head; 431 beyond.
        max_buffered_bytes: of all bodies held at once (a body is held until its response begins); 503 beyond.
        max_requests_in_flight: over all engines; 503 beyond.
        max_requests_per_engine: requests, and so connections, to one engine at once; it is not picked beyond.
        max_idle_per_engine: connections kept open for reuse.
        max_connections: client connections; 503 and closed beyond.
    """

    max_body_bytes: int = 32 * MIB
    max_head_bytes: int = 64 * 1024
    max_buffered_bytes: int = 1024 * MIB
    max_requests_in_flight: int = 4096
    max_requests_per_engine: int = 2048
    max_idle_per_engine: int = 128
    max_connections: int = 8192


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds, kept to within ``sweep_seconds``.

    Args:
        connect_seconds: to open a connection to an engine.
        first_byte_seconds: from request to the first byte of the engine's response; without streaming that is the
            whole generation.
        idle_seconds: between two pieces of a response, either because the engine is silent or the client does not read.
        request_seconds: for a client to send a request once it has begun.
        client_idle_seconds: a client connection kept open between requests.
        engine_idle_seconds: an engine connection kept for reuse. Below the 5 s after which uvicorn, and so vLLM,
            closes it from its side.
        drain_seconds: for requests in flight when the router stops.
        sweep_seconds: how often deadlines are looked at.
    """

    connect_seconds: float = 5.0
    first_byte_seconds: float = 600.0
    idle_seconds: float = 120.0
    request_seconds: float = 60.0
    client_idle_seconds: float = 75.0
    engine_idle_seconds: float = 4.0
    drain_seconds: float = 10.0
    sweep_seconds: float = 0.1


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """How engines are probed (``GET /health`` each).

    Args:
        interval_seconds: between two probes of an engine.
        deadline_seconds: for one probe; later counts as failed.
        failures_to_down: timeouts in a row that take an engine out. A refused connection does at once.
        models_every: probes after which ``/v1/models`` is read again (LoRA adapters come and go).
    """

    interval_seconds: float = 1.0
    deadline_seconds: float = 2.0
    failures_to_down: int = 3
    models_every: int = 10


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where an engine tells what its cache holds.

    Args:
        events: its KV event socket as vLLM publishes it, ``tcp://host:port`` or ``ipc:///path``; a data-parallel
            rank's port is this one plus the rank.
        replay: its replay socket, ``tcp://host:port``; "" for none.
        snapshot: ``host:port`` of the connector's snapshot; "" for none.
    """

    events: str
    replay: str = ""
    snapshot: str = ""


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What policy ``kv-aware`` is told.

    Args:
        events: by engine name.
        tokenizer: directory with the model's ``tokenizer.json``; "" asks each engine's own ``/tokenize``.
        store: address of the shared store, whose feed says what it holds; "" for none.
        store_password: what the store wants; None for none.
        snapshot_token: what snapshots want as bearer token.
        block_tokens: tokens of a KV block; 0 takes what the events say.
        index_bytes: most memory of the index.
        tokens_seconds: most time to wait for token ids; beyond it a request is routed by its text.
        gpu: catalog name of the engines' GPU, for the cost model; "" learns a prefill rate instead.
        model: catalog name of the model, for the cost model.
        tensor_parallel: ranks of one engine, for the cost model.
    """

    events: Mapping[str, EventSource] = field(default_factory=dict)
    tokenizer: str = ""
    store: str = ""
    store_password: str | None = field(default=None, repr=False)
    snapshot_token: str = field(default="", repr=False)
    block_tokens: int = 0
    index_bytes: int = 512 * MIB
    tokens_seconds: float = 2.0
    gpu: str = ""
    model: str = ""
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name, source in self.events.items():
            where = f"kv events, {name}"
            for url in (source.events, source.replay):
                if url:
                    _check_zmq(url, where)
            if source.snapshot:
                _check_host_port(source.snapshot, where)
            if not source.events:
                raise UserError("no address", where=where, remedy="use tcp://host:port")
        for name in ("index_bytes", "tokens_seconds", "tensor_parallel"):
            if not getattr(self, name) > 0:
                raise UserError(
                    f"{getattr(self, name)} is not positive", where=f"kv.{name}", remedy="use a number above 0"
                )
        if self.block_tokens < 0:
            raise UserError(f"{self.block_tokens} tokens", where="kv.block_tokens", remedy="use 1 or more")
        if bool(self.gpu) != bool(self.model):
            had, lacks = ("gpu", "model") if self.gpu else ("model", "gpu")
            raise UserError(f"{had} without {lacks}", where="cost model", remedy="name both, or neither")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """One router.

    Args:
        engines: (name, base URL) each; the URL is ``http://host:port``.
        listen_host: address to listen on; beyond loopback ``api_key`` is required.
        listen_port: 0 takes a free one.
        policy: name of the routing policy; None takes kv-aware where KV events are configured, else prefix.
        prefix: settings of policy ``prefix``.
        kv: settings of policy ``kv-aware``.
        aliases: further names of models: alias to the name that engines know. An alias hides a model of its name.
        data_parallel: data-parallel ranks by engine name, each a target of its own; 1 where nothing is said.
        session_header: header whose value keeps requests of policy ``session`` together.
        decisions_kept: decisions that ``/debug/decision`` can explain.
        api_key: when set, every route except ``/health`` wants ``Authorization: Bearer <api_key>``. The header goes
            on to the engine, and health checks send it too: one key for the fleet.

    Raises:
        UserError: a value is impossible, or the listener would be open to others without a key.
    """

    engines: Sequence[tuple[str, str]]
    listen_host: str = "127.0.0.1"
    listen_port: int = 8000
    policy: str | None = None
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    aliases: Mapping[str, str] = field(default_factory=dict)
    data_parallel: Mapping[str, int] = field(default_factory=dict)
    session_header: str = "x-session-id"
    decisions_kept: int = 64
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    health: HealthChecks = field(default_factory=HealthChecks)
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.engines:
            raise UserError("no engine given", where="engines", remedy="name at least one, as http://host:port")
        names = [name for name, _ in self.engines]
        for name in names:
            _check_name(name)
            if names.count(name) > 1:
                raise UserError(f"{name!r} is there twice", where="engines", remedy="give each engine its own name")
        for name, url in self.engines:
            parse_engine_url(url, where=f"engine {name}")
        if not 0 <= self.listen_port <= 65535:
            raise UserError(f"port {self.listen_port} does not exist", where="listen", remedy="use 0 to 65535")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("the key is empty or not printable ASCII", where="api_key", remedy="set a printable key")
        if self.api_key is None and not is_loopback(self.listen_host):
            raise UserError(
                f"{self.listen_host} is reachable from other machines and there is no API key",
                where="listen",
                remedy="set KVHEARTH_ROUTER_API_KEY or an API key file, or listen on 127.0.0.1",
            )
        _check_positive(self.limits, "limits")
        _check_positive(self.timeouts, "timeouts")
        _check_positive(self.health, "health")
        self._check_names(set(names))
        if self.policy_name not in POLICY_NAMES:
            remedy = f"use one of {', '.join(POLICY_NAMES)}"
            raise UserError(f"unknown policy {self.policy!r}", where="policy", remedy=remedy)
        if self.policy_name == KvAware.name and not self.kv.events:
            remedy = "say where they come from (--kv-events), or use prefix"
            raise UserError("kv-aware needs the engines' KV events", where="policy", remedy=remedy)

    @property
    def policy_name(self) -> str:
        """The policy, also where none was named."""
        if self.policy is not None:
            return self.policy
        return KvAware.name if self.kv.events else Prefix.name

    def _check_names(self, engines: set[str]) -> None:
        for where, named in (("kv events", self.kv.events), ("data parallel", self.data_parallel)):
            for name in named:
                if name not in engines:
                    raise UserError(
                        f"there is no engine {name!r}", where=where, remedy=f"name one of {', '.join(sorted(engines))}"
                    )
        for name, ranks in self.data_parallel.items():
            if not 1 <= ranks <= MOST_RANKS:
                raise UserError(f"{ranks} ranks", where=f"data parallel, {name}", remedy=f"use 1 up to {MOST_RANKS}")
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


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a listener on ``host`` (an address, or the name localhost)."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_engine_url(url: str, *, where: str) -> tuple[str, int]:
    """Host and port of an engine's base URL.

    Raises:
        UserError: it is not ``http://host[:port]``, or says more than that.
    """
    remedy = "use http://host:port"
    try:
        parts = urlsplit(url)
        port = 80 if parts.port is None else parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is not a URL ({error})", where=where, remedy=remedy) from None
    if parts.scheme != "http" or not parts.hostname or port == 0:
        raise UserError(f"{url!r} is not an http URL with a host and a port", where=where, remedy=remedy)
    if parts.path not in {"", "/"} or parts.query or parts.fragment or parts.username is not None:
        raise UserError(f"{url!r} has more than host and port", where=where, remedy=remedy)
    return parts.hostname, port


def parse_listen(listen: str) -> tuple[str, int]:
    """Host and port of ``host:port`` (``[::1]:8000`` for IPv6).

    Raises:
        UserError: it is something else.
    """
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal():
        raise UserError(f"{listen!r} is not an address", where="listen", remedy="use host:port, as 127.0.0.1:8000")
    return host, int(port)


def _check_zmq(url: str, where: str) -> None:
    scheme, slashes, address = url.partition("://")
    if scheme == "ipc" and address.startswith("/"):
        return
    if scheme != "tcp" or not slashes:
        raise UserError(f"{url!r} is not a ZeroMQ address", where=where, remedy="use tcp://host:port or ipc:///path")
    _check_host_port(address, where)


def _check_host_port(address: str, where: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port[:9]) <= 65535:
        raise UserError(f"{address!r} is not host:port", where=where, remedy="use host:port, as 127.0.0.1:5557")


def _check_name(name: str) -> None:
    if not name or not name.isascii() or not name.isprintable() or " " in name:
        raise UserError(
            f"{name!r} cannot name an engine", where="engines", remedy="use printable ASCII without spaces, as engine-0"
        )


def _check_positive(group: Limits | Timeouts | HealthChecks, where: str) -> None:
    for name in group.__slots__:
        value = getattr(group, name)
        if not value > 0:
            raise UserError(f"{value} is not positive", where=f"{where}.{name}", remedy="use a number above 0")
