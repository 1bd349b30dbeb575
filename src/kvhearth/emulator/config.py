"""What an emulated engine is told, checked, and what follows from it: cost model, engine shape, modelled links."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvhearth.cost import CostModel, Model, Parallelism, find_model
from kvhearth.emulator.protocol import ModelLimits
from kvhearth.emulator.publisher import KvEventsConfig, rank_endpoint
from kvhearth.emulator.vllm_hashes import DEFAULT_ALGORITHM, Adapter, VllmHasher
from kvhearth.engine import EngineConfig, OffloadMode
from kvhearth.engine.links import DEFAULT_STORE_LINK, ModelledLinks, modelled_links
from kvhearth.engine.ports import DramAdmission
from kvhearth.engine.sizing import size_engine, stored_bytes
from kvhearth.engine.validate import check_config
from kvhearth.errors import UserError
from kvhearth.store.protocol.address import Address, parse_address
from kvhearth.units import format_bytes

MAX_PAYLOAD_BYTES = 64 << 20
MAX_RANKS = 64
MAX_ADAPTERS = 256


@dataclass(frozen=True, slots=True)
class EmulatorConfig:
    """An emulated engine. Names follow vLLM's flags where there is one.

    Args:
        model: of the catalog, or the path of a ``config.json``.
        gpu: of the catalog.
        host, port: where to listen; port 0 takes any free one.
        served_model_name: what clients call the model; by default ``model``.
        engine_id: the ``engine`` label of its metrics.
        num_gpu_blocks_override: KV blocks in HBM, one of which stays empty as in vLLM; None = what memory gives.
        gpu_memory_utilization: share of HBM that weights and KV may use.
        max_model_len: longest prompt plus output; None = 131,072 or what HBM holds, whichever is less.
        dram_bytes: DRAM tier (modes native and shared), in real KV bytes.
        blocks_per_chunk: KV blocks moved and stored as one unit.
        dram_admission: chunks go to DRAM once computed (eager), or once their blocks are needed (lazy).
        store: address of the store (mode shared).
        store_password: what to AUTH with at the store.
        store_bytes_scale: one real byte goes to the store for so many of KV (at least 64 a chunk).
        store_link: the link to the store that is modelled, by name.
        store_deadline_seconds: of the wall clock, for each call of the store.
        time_scale: emulated seconds that pass in one second of the wall clock.
        stream_interval: tokens a streamed piece; the first token always comes at once.
        data_parallel_size: ranks, each an engine of its own behind the same port; a request's ``X-data-parallel-rank``
            names one.
        lora_modules: names of adapters and their paths, which enter block hashes; nothing is loaded.
        kv_events: what is published of KV, and where; None = nothing.
        self_describing_kv_events: events of DRAM and the store tell blocks and tokens, not only a chunk's key.
        prefix_caching_hash_algo: vLLM's name of the block hashes; None = vLLM's default with KV events, otherwise
            quicker ones, which nobody sees.
        hash_seed: ``PYTHONHASHSEED`` of the engine that is emulated; None = unset.
        api_key: what clients must send as bearer token on ``/v1``; needed beyond loopback.

    Raises:
        UserError: a value that cannot work, naming the field.
    """

    model: str
    gpu: str = "h100-sxm"
    host: str = "127.0.0.1"
    port: int = 8001
    served_model_name: str = ""
    engine_id: str = "0"
    tensor_parallel_size: int = 1
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int | None = None
    offload_mode: OffloadMode = OffloadMode.NONE
    dram_bytes: int = 64 << 30
    blocks_per_chunk: int = 1
    dram_admission: DramAdmission = "eager"
    store: str | None = None
    store_password: str | None = field(default=None, repr=False)
    store_bytes_scale: int = 1024
    store_link: str = DEFAULT_STORE_LINK
    store_deadline_seconds: float = 1.0
    time_scale: float = 1.0
    stream_interval: int = 1
    data_parallel_size: int = 1
    lora_modules: tuple[tuple[str, str], ...] = ()
    kv_events: KvEventsConfig | None = None
    self_describing_kv_events: bool = False
    prefix_caching_hash_algo: str | None = None
    hash_seed: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_ranks()
        self._check_adapters()
        self._check_access()

    def _check_numbers(self) -> None:
        if not 0 < self.time_scale <= 1000:
            raise UserError(f"{self.time_scale}", where="time_scale", remedy="give more than 0, at most 1000")
        if not 0 < self.store_deadline_seconds <= 60:
            raise UserError(
                f"{self.store_deadline_seconds}", where="store_deadline_seconds", remedy="give more than 0, at most 60"
            )
        for name in ("stream_interval", "store_bytes_scale", "tensor_parallel_size", "block_size", "blocks_per_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{getattr(self, name)} is too small", where=name, remedy="give at least 1")
        if not 0 <= self.port <= 65_535:
            raise UserError(f"{self.port} is no port", where="port", remedy="give 0 to 65535")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 2:
            raise UserError(
                f"{self.num_gpu_blocks_override} blocks", where="num_gpu_blocks_override", remedy="give at least 2"
            )

    def _check_ranks(self) -> None:
        if not 1 <= self.data_parallel_size <= MAX_RANKS:
            raise UserError(
                f"{self.data_parallel_size}", where="data_parallel_size", remedy=f"give 1 to {MAX_RANKS} ranks"
            )
        if self.publishes_events is not None:
            for endpoint in (self.publishes_events.endpoint, self.publishes_events.replay_endpoint):
                if endpoint is not None:
                    rank_endpoint(endpoint, self.data_parallel_size - 1, where="kv_events_config")

    def _check_access(self) -> None:
        if (self.offload_mode is OffloadMode.SHARED) != (self.store is not None):
            raise UserError(
                f"offload mode {self.offload_mode.value} {'without' if self.store is None else 'with'} a store",
                where="store",
                remedy="mode shared needs --store host:port or unix:/path, the other modes none",
            )
        if self.store is not None:
            parse_address(self.store, where="store")
        if self.api_key is not None and not self.api_key:
            raise UserError("the API key is empty", where="api_key", remedy="set a longer one, or none at all")
        if not Address(host=self.host).is_loopback and self.api_key is None:
            raise UserError(
                f"{self.host} can be reached from other machines and there is no API key",
                where="host",
                remedy="set KVHEARTH_EMULATOR_API_KEY or --api-key-file, or listen on 127.0.0.1",
            )

    @property
    def publishes_events(self) -> KvEventsConfig | None:
        """``kv_events``, if there is anything to publish."""
        return self.kv_events if self.kv_events is not None and self.kv_events.publishes else None

    @property
    def hash_algorithm(self) -> str | None:
        """The block hashes' name in vLLM; None = our own."""
        if self.prefix_caching_hash_algo is None and self.publishes_events is not None:
            return DEFAULT_ALGORITHM
        return self.prefix_caching_hash_algo

    def rank_name(self, rank: int) -> str:
        """The label ``engine`` of a rank's metrics: vLLM numbers them."""
        if self.data_parallel_size == 1:
            return self.engine_id
        return str(rank) if self.engine_id == "0" else f"{self.engine_id}#{rank}"

    def _check_adapters(self) -> None:
        names = [name for name, _ in self.lora_modules]
        if len(names) > MAX_ADAPTERS:
            raise UserError(f"{len(names)} adapters", where="lora_modules", remedy=f"give at most {MAX_ADAPTERS}")
        for name, path in self.lora_modules:
            if not name or not path:
                raise UserError(f"{name!r}={path!r}", where="lora_modules", remedy="write NAME=PATH")
            if names.count(name) > 1 or name == (self.served_model_name or self.model):
                raise UserError(f"{name!r} is taken", where="lora_modules", remedy="give each adapter its own name")


@dataclass(frozen=True, slots=True)
class Shape:
    """What follows from an `EmulatorConfig`.

    Attributes:
        payload_bytes: bytes that stand for a chunk in the store.
        namespace: begins every key in the store, 32 hex digits: what must be equal for KV to be interchangeable.
        hasher: makes block hashes as vLLM; None = nobody sees them, and quicker ones do.
    """

    cost: CostModel
    engine: EngineConfig
    limits: ModelLimits
    payload_bytes: int
    namespace: str
    hasher: VllmHasher | None

    def links(self, store_link: str) -> ModelledLinks:
        """Fresh, idle links."""
        return modelled_links(self.cost, store_link, self.engine.chunk_bytes)


def shape_of(config: EmulatorConfig) -> Shape:
    """Work out an engine.

    Raises:
        UserError: unknown model, GPU or link; a model that the GPU cannot hold; limits that contradict each other.
    """
    model = Model.from_hf_config(config.model) if config.model.endswith(".json") else find_model(config.model)
    cost = CostModel(model, config.gpu, Parallelism(tp=config.tensor_parallel_size), block_size=config.block_size)
    cost.link(config.store_link)
    engine = size_engine(
        cost,
        gpu_memory_utilization=config.gpu_memory_utilization,
        num_gpu_blocks_override=config.num_gpu_blocks_override,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        mode=config.offload_mode,
        dram_bytes=config.dram_bytes,
        blocks_per_chunk=config.blocks_per_chunk,
        dram_admission=config.dram_admission,
    )
    check_config(engine)
    adapters = tuple(Adapter(name, path, number) for number, (name, path) in enumerate(config.lora_modules, 1))
    limits = ModelLimits(config.served_model_name or config.model, engine.max_model_len, adapters)
    algorithm = config.hash_algorithm
    hasher = None if algorithm is None else VllmHasher(algorithm, config.hash_seed)
    payload_bytes = stored_bytes(engine.chunk_bytes, config.store_bytes_scale)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise UserError(
            f"a chunk becomes {format_bytes(payload_bytes)} in the store",
            where="store_bytes_scale",
            remedy=f"raise it to at least {engine.chunk_bytes // MAX_PAYLOAD_BYTES}",
        )
    same = (model.name, cost.kv_dtype, config.block_size, config.blocks_per_chunk, payload_bytes, algorithm)
    seed = None if algorithm is None else config.hash_seed
    namespace = hashlib.sha256(repr(("emulator", *same, seed)).encode()).hexdigest()[:32]
    return Shape(cost, engine, limits, payload_bytes, namespace, hasher)
