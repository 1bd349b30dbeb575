"""What the router may hold and how long it may wait: limits, deadlines, health checks, queue, retries, breakers."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvhearth.errors import UserError
from kvhearth.router.config.parsing import check_positive, says

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on memory and work."""

    max_body_bytes: int = field(
        default=32 * MIB, metadata=says("Largest request body; 413 beyond.", flag="--max-body-size")
    )
    max_head_bytes: int = field(
        default=64 * 1024,
        metadata=says("Largest head of a request (431 beyond) or of a response (502).", flag="--max-head-size"),
    )
    max_buffered_bytes: int = field(
        default=1024 * MIB,
        metadata=says(
            "Request bodies held at once, each until its response begins; 503 beyond.", flag="--max-buffered-size"
        ),
    )
    max_requests_in_flight: int = field(
        default=4096, metadata=says("Requests at once, those that wait too; 503 beyond.")
    )
    max_requests_per_engine: int = field(
        default=2048, metadata=says("Requests, and so connections, to one engine at once; others wait in the queue.")
    )
    max_idle_per_engine: int = field(default=128, metadata=says("Connections to an engine kept open for reuse."))
    max_connections: int = field(default=8192, metadata=says("Client connections at once; 503 and closed beyond."))

    def __post_init__(self) -> None:
        check_positive(self, "limits")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in seconds, kept to within ``sweep_seconds``."""

    connect_seconds: float = field(
        default=5.0, metadata=says("To open a connection to an engine.", flag="--connect-timeout-seconds")
    )
    first_byte_seconds: float = field(
        default=600.0,
        metadata=says(
            "From request to the first byte of a response; without streaming that is the whole generation.",
            flag="--first-byte-timeout-seconds",
        ),
    )
    idle_seconds: float = field(
        default=120.0,
        metadata=says(
            "Between two pieces of a response: the engine is silent, or the client does not read.",
            flag="--idle-timeout-seconds",
        ),
    )
    request_seconds: float = field(
        default=60.0, metadata=says("For a client to send a request that it has begun.", flag="--request-seconds")
    )
    client_idle_seconds: float = field(
        default=75.0, metadata=says("A client connection is kept open that long between requests.")
    )
    engine_idle_seconds: float = field(
        default=4.0,
        metadata=says("An engine connection is kept that long for reuse; uvicorn, and so vLLM, closes it after 5 s."),
    )
    drain_seconds: float = field(default=10.0, metadata=says("For requests in flight when the router stops."))
    sweep_seconds: float = field(default=0.1, metadata=says("How often deadlines are looked at."))

    def __post_init__(self) -> None:
        check_positive(self, "timeouts")


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """How engines are probed (``GET /health`` each)."""

    interval_seconds: float = field(default=1.0, metadata=says("Between two health checks of an engine."))
    deadline_seconds: float = field(default=2.0, metadata=says("For one check; later counts as failed."))
    failures_to_down: int = field(
        default=3, metadata=says("Timeouts in a row that take an engine out. A refused connection does at once.")
    )
    models_every: int = field(
        default=10, metadata=says("Checks after which the list of models is read again (LoRA adapters come and go).")
    )

    def __post_init__(self) -> None:
        check_positive(self, "health")


@dataclass(frozen=True, slots=True)
class Queueing:
    """Where requests wait while every engine of their model is full."""

    wait_seconds: float = field(
        default=30.0,
        metadata=says("Longest wait for an engine; 503 after it. 0: nobody waits.", flag="--queue-wait-seconds"),
    )
    max_waiting_requests: int = field(default=1024, metadata=says("Requests that may wait; 503 beyond."))
    max_waiting_of_tenant: int = field(
        default=256, metadata=says("Of them, those of a tenant that has no bound of its own; 429 beyond.")
    )
    engine_backlog: int = field(
        default=32,
        metadata=says("Requests that an engine may report as waiting before it counts as full. 0: never does."),
    )

    def __post_init__(self) -> None:
        check_positive(self, "queue", may_be_zero=("wait_seconds", "engine_backlog"))


@dataclass(frozen=True, slots=True)
class Resilience:
    """What is tried again, and when an engine is left alone for a while."""

    max_attempts: int = field(
        default=3, metadata=says("Engines a request may be sent to, one after the other, while nothing was answered.")
    )
    retry_share: float = field(
        default=0.2, metadata=says("Retries over requests, at most: what keeps an outage from multiplying the load.")
    )
    retry_burst: int = field(default=100, metadata=says("Retries that may be saved up for the moment of a failure."))
    failures_to_open: int = field(
        default=5, metadata=says("Failures of an engine in a row that open its breaker: it gets no requests.")
    )
    error_share: float = field(
        default=0.5, metadata=says("Share of an engine's last answers (20 at least) with status 5xx that opens it too.")
    )
    open_seconds: float = field(
        default=2.0,
        metadata=says("First time that a breaker stays open before one request is let through; doubles each time."),
    )
    longest_open_seconds: float = field(default=30.0, metadata=says("Longest time that a breaker stays open."))
    slow_start_seconds: float = field(
        default=20.0,
        metadata=says("An engine that has come up gets its full share of requests after that. 0: at once."),
    )

    def __post_init__(self) -> None:
        check_positive(self, "resilience", may_be_zero=("retry_share", "retry_burst", "slow_start_seconds"))
        for name in ("retry_share", "error_share"):
            if getattr(self, name) > 1:
                raise UserError(
                    f"{getattr(self, name)} is more than all", where=f"resilience.{name}", remedy="use up to 1"
                )
