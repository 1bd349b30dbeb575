"""What policy kv-aware is told: where KV events come from, the tokenizer, the store, the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvhearth.errors import UserError
from kvhearth.router.config.bounds import MIB
from kvhearth.router.config.parsing import check_host_port, check_positive, check_zmq, says


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

    def check(self, where: str) -> None:
        """Raises UserError, naming ``where``, unless all addresses can be such."""
        if not self.events:
            raise UserError("no address", where=where, remedy="use tcp://host:port")
        for url in (self.events, self.replay):
            if url:
                check_zmq(url, where)
        if self.snapshot:
            check_host_port(self.snapshot, where)


@dataclass(frozen=True, slots=True)
class KvSettings:
    """What policy ``kv-aware`` is told.

    Args:
        events: by engine name.
        store_password: what the store wants; None for none.
        snapshot_token: what snapshots want as bearer token.
    """

    events: Mapping[str, EventSource] = field(
        default_factory=dict,
        metadata=says("Where an engine publishes its KV events: name=tcp://host:port. Repeatable.", flag="--kv-events"),
    )
    tokenizer: str = field(
        default="",
        metadata=says(
            "Directory of the model's tokenizer; without one the engines are asked for token ids.", restart=True
        ),
    )
    store: str = field(
        default="", metadata=says("Address of the shared store, whose feed says what it holds.", restart=True)
    )
    store_password: str | None = field(
        default=None, repr=False, metadata=says("Password that the store wants.", restart=True)
    )
    snapshot_token: str = field(
        default="", repr=False, metadata=says("Bearer token that snapshots want.", restart=True)
    )
    block_tokens: int = field(
        default=0,
        metadata=says(
            "Tokens of the engines' KV blocks; 0 takes what their events say.", flag="--block-size", restart=True
        ),
    )
    index_bytes: int = field(
        default=512 * MIB, metadata=says("Most memory of the KV index.", flag="--index-size", restart=True)
    )
    tokens_seconds: float = field(
        default=2.0,
        metadata=says("Longest wait for token ids; beyond it a request is routed by its text.", restart=True),
    )
    gpu: str = field(
        default="",
        metadata=says(
            "The engines' GPU in the catalog, for the cost model; without it a rate is learned.", restart=True
        ),
    )
    model: str = field(
        default="",
        metadata=says("The model in the catalog, for the cost model; with gpu.", flag="--cost-model", restart=True),
    )
    tensor_parallel: int = field(
        default=1, metadata=says("GPUs of one engine, for the cost model.", flag="--tensor-parallel-size", restart=True)
    )

    def __post_init__(self) -> None:
        for name, source in self.events.items():
            source.check(f"kv events, {name}")
        check_positive(self, "kv", may_be_zero=("block_tokens",))
        if bool(self.gpu) != bool(self.model):
            had, lacks = ("gpu", "model") if self.gpu else ("model", "gpu")
            raise UserError(f"{had} without {lacks}", where="cost model", remedy="name both, or neither")
