"""The Stack: one deployment in words. Values and their rules only; files are `loading`'s part, the catalog `fit`'s."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from kvhearth.stack.fields import (
    Bytes,
    Listen,
    LocalListen,
    Name,
    PowerOfTwo,
    Section,
    SocketPath,
    from_directory,
    parse_address,
    slug,
    wrong,
)
from kvhearth.stack.vllm import CPU_BLOCK_MULTIPLE, Vllm

DEFAULT_GPU_MEMORY_UTILIZATION = 0.92
"""As in vLLM 0.32."""
MOST_POOLS = 32
DEFAULT_LOOKUP_SECONDS = 0.05
LMCACHE_CHUNK_TOKENS = 256
"""LMCache's default ``chunk_size`` (docs.lmcache.ai, "Configuring LMCache")."""

Mode = Literal["none", "native", "shared", "lmcache"]
"""Offload mode of a pool."""

DramAdmission = Literal["eager", "lazy"]
StoreAdmission = Literal["always", "second-sight"]

EngineKind = Literal["emulated", "vllm"]

PolicyName = Literal["round-robin", "random", "least-loaded", "session", "prefix", "kv-aware"]
"""Routing policy of a router."""


class Offload(Section):
    """Where KV goes when it leaves HBM."""

    mode: Mode = Field(
        default="none",
        description="none; native: the engine's DRAM; shared: DRAM and behind it the store of all engines; "
        "lmcache: LMCache's own connector (engine: vllm only)",
    )
    dram_size: Bytes = Field(default=64 << 30, description="DRAM tier of each engine, all its ranks together", ge=1)
    blocks_per_chunk: int = Field(default=1, ge=1, le=1024, description="KV blocks moved and stored as one unit")
    dram_admission: DramAdmission = Field(
        default="eager",
        description="eager: a chunk goes to DRAM when it is computed; lazy: when it is about to lose its place in HBM",
    )
    store_admission: StoreAdmission = Field(
        default="always",
        description="always: a chunk in DRAM goes on to the store; second-sight: once it was asked for a second time",
    )
    lookup_timeout_seconds: float = Field(
        default=DEFAULT_LOOKUP_SECONDS,
        gt=0,
        le=60,
        description="deadline of asking the store what it has; then it has nothing (engine: vllm)",
    )


class Emulator(Section):
    """How emulated engines keep time and move bytes."""

    time_scale: float = Field(
        default=1.0, gt=0, le=1000, description="emulated seconds that pass in one second of the clock"
    )
    stream_interval: int = Field(
        default=1, ge=1, le=10_000, description="tokens a streamed piece (vLLM's --stream-interval)"
    )
    store_bytes_scale: int = Field(
        default=1024, ge=1, le=1 << 20, description="one real byte in the store for so many of KV"
    )
    store_link: str = Field(
        default="ethernet-100g", min_length=1, description="link to the store that is modelled, of the catalog"
    )


def _is_directory(model: str, context: dict[str, Any] | None) -> bool:
    """Whether a model is a path, by its looks or because it lies beside the file, and not a Hugging Face id."""
    return model.startswith(("./", "../", "/")) or bool(context and Path(from_directory(model, context)).is_dir())


class Pool(Section):
    """Engines that serve one model in one shape. Names follow vLLM's flags."""

    model: str = Field(
        min_length=1,
        description="emulated: a model of the catalog, or the path of a config.json; "
        "vllm: a directory or a Hugging Face id (paths from this file)",
    )
    name: Name = Field(
        default="", description="unique in the stack; engines are NAME-0, NAME-1, …; by default after the model"
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="what clients call the model; by default model"
    )
    gpu: str = Field(
        default="H100", min_length=1, description="a GPU of the catalog; with engine: vllm only for predictions"
    )
    engine: EngineKind = Field(default="emulated", description="emulated: no GPU, no weights; vllm: the real one")
    replicas: int = Field(default=1, ge=1, le=64)
    tensor_parallel_size: PowerOfTwo = Field(default=1, ge=1, le=64)
    block_size: PowerOfTwo = Field(default=16, ge=1, le=1024, description="tokens a KV block")
    num_gpu_blocks_override: int | None = Field(
        default=None, ge=2, description="KV blocks in HBM, instead of what memory gives"
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description=f"share of HBM for weights and KV ({DEFAULT_GPU_MEMORY_UTILIZATION} when neither is set)",
    )
    max_num_seqs: int = Field(default=256, ge=1, le=65_536)
    max_num_batched_tokens: int = Field(default=8192, ge=1, le=1 << 20)
    max_model_len: int | None = Field(
        default=None, ge=1, description="longest prompt plus output; by default the model's own"
    )
    offload: Offload = Offload()
    emulator: Emulator = Emulator()
    vllm: Vllm = Vllm()

    @model_validator(mode="before")
    @classmethod
    def _place_and_name(cls, data: Any, info: ValidationInfo) -> Any:
        """Make a model's path start from the file, and name the pool after its model."""
        if not isinstance(data, dict):
            return data
        model = data.get("model")
        if not isinstance(model, str):
            return {"name": "pool", **data}
        if model.endswith(".json") or (data.get("engine") == "vllm" and _is_directory(model, info.context)):
            model = from_directory(model, info.context)
        path = Path(model)
        name = slug(path.parent.name if path.suffix == ".json" else path.name)
        return {"name": name, **data, "model": model}

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        if self.engine == "emulated":
            self._check_emulated(self.offload)
        elif self.model.endswith(".json"):
            raise wrong("model", f"{self.model!r} has no weights", "engine: vllm wants the directory that it lies in")
        elif self.vllm.device == "cpu" and self.block_size % CPU_BLOCK_MULTIPLE:
            raise wrong(
                "block_size",
                f"{self.block_size}: vLLM on a CPU wants a multiple of {CPU_BLOCK_MULTIPLE}",
                f"set block_size: {CPU_BLOCK_MULTIPLE}",
            )
        return self

    @staticmethod
    def _check_emulated(offload: Offload) -> None:
        if offload.mode == "lmcache":
            raise wrong("offload.mode", "'lmcache' is run, not emulated", "set engine: vllm, or mode: native")
        if offload.store_admission != "always":
            remedy = "set always, or engine: vllm which can do it"
            raise wrong("offload.store_admission", f"{offload.store_admission!r} is not emulated", remedy)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_gpu_blocks_override is not None and self.gpu_memory_utilization is not None:
            raise wrong("gpu_memory_utilization", "set together with num_gpu_blocks_override", "keep one of the two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise wrong(
                "max_num_batched_tokens",
                f"{self.max_num_batched_tokens} is less than max_num_seqs ({self.max_num_seqs})",
                "a step must have a token for each running request: raise it, or lower max_num_seqs",
            )
        blocks = self.num_gpu_blocks_override
        if (
            blocks is not None
            and self.max_model_len is not None
            and (blocks - 1) * self.block_size < self.max_model_len
        ):
            raise wrong(
                "max_model_len",
                f"{self.max_model_len} tokens do not fit {blocks} blocks of {self.block_size} (one stays empty)",
                f"lower it to {(blocks - 1) * self.block_size}, or raise num_gpu_blocks_override",
            )
        return self


class Store(Section):
    """The KV store that all engines of mode shared use."""

    size: Bytes = Field(default=1 << 30, ge=1 << 20, description="real memory of this machine, taken at the start")
    listen: LocalListen | None = Field(
        default="127.0.0.1:0", description="TCP address; port 0 picks a free one, null: none"
    )
    unix: SocketPath | None = Field(
        default=None, description="path of its unix socket; by default one in a private directory"
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="YAML file with further settings of `kvhearth store serve`: tiers, policy, quotas, TLS, users",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="a store or ring that runs elsewhere, as `a:7420,b:7420` or `dns:name:7420`; then none is started",
    )
    copies: int = Field(default=1, ge=1, le=2, description="nodes of a ring that keep each chunk")

    @field_validator("config")
    @classmethod
    def _from_the_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else from_directory(value, info.context)

    @model_validator(mode="after")
    def _here_or_elsewhere(self) -> Self:
        if self.address is None:
            if self.copies != 1:
                raise wrong("copies", f"{self.copies} on the one node that is started here", "give 1, or an address")
            return self
        for name in ("listen", "unix", "config"):
            if name in self.model_fields_set:
                raise wrong(name, "the store at address is not started here", f"leave out {name}, or address")
        return self


class Router(Section):
    """The address that users talk to."""

    listen: Listen = Field(
        default="127.0.0.1:8000", description="beyond loopback only with api_key_file; port 0 picks a free one"
    )
    policy: PolicyName = Field(default="prefix", description="how an engine is picked")
    api_key_file: str | None = Field(default=None, min_length=1, description="file with the key that clients must send")
    drain_seconds: float = Field(default=3.0, gt=0, le=300, description="for requests in flight when stopping")

    @field_validator("api_key_file")
    @classmethod
    def _from_the_file(cls, value: str | None, info: ValidationInfo) -> str | None:
        return None if value is None else from_directory(value, info.context)

    @model_validator(mode="after")
    def _key_beyond_loopback(self) -> Self:
        if self.api_key_file is None and not parse_address(self.listen).is_loopback:
            remedy = "set api_key_file, or listen at 127.0.0.1"
            raise wrong("listen", f"{self.listen!r} is reachable from other machines and there is no API key", remedy)
        return self


class Engine(NamedTuple):
    """One engine of a stack: its name and the pool that shapes it."""

    name: str
    pool: Pool


def _some_with_unique_names(pools: tuple[Pool, ...]) -> tuple[Pool, ...]:
    if not 1 <= len(pools) <= MOST_POOLS:
        raise ValueError(f"want 1 to {MOST_POOLS} pools, not {len(pools)}")
    seen: set[str] = set()
    for index, pool in enumerate(pools):
        if pool.name in seen:
            raise wrong(f"[{index}].name", f"{pool.name!r} is the name of two pools", "give each pool its own name")
        seen.add(pool.name)
    return pools


class Stack(Section):
    """One deployment: model pools, offload, store and router."""

    name: Name = "local"
    pools: Annotated[tuple[Pool, ...], AfterValidator(_some_with_unique_names)] = Field(
        json_schema_extra={"minItems": 1, "maxItems": MOST_POOLS}
    )
    store: Store | None = Field(default=None, description="required by mode shared")
    router: Router = Router()

    @model_validator(mode="after")
    def _shared_needs_store(self) -> Self:
        for index, pool in enumerate(self.pools):
            if pool.offload.mode == "shared" and self.store is None:
                raise wrong(
                    f"pools[{index}].offload.mode",
                    "'shared' needs a store",
                    "add a section store: {size: 1GiB}, or use native",
                )
            if pool.engine == "emulated" and self.store is not None and self.store.copies != 1:
                remedy = f"give 1, or engine: vllm in pools[{index}]"
                raise wrong("store.copies", f"{self.store.copies} is not emulated", remedy)
        return self

    @model_validator(mode="after")
    def _own_ports(self) -> Self:
        listen = self.store.listen if self.store is not None else None
        if listen is not None and listen == self.router.listen and parse_address(listen).port != 0:
            raise wrong("store.listen", f"{listen} is router.listen too", "give each its own port, or 0 for a free one")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> Stack:
        """Read a Stack file and check it against the catalog. Raises UserError naming file, field, value and remedy."""
        from kvhearth.stack.fit import check_catalog
        from kvhearth.stack.loading import read_stack

        stack = read_stack(path)
        check_catalog(stack, where=str(path))
        return stack

    def to_yaml(self) -> str:
        """The Stack as YAML, every field spelled out."""
        from kvhearth.stack.loading import write_stack

        return write_stack(self)

    def engines(self) -> list[Engine]:
        """Every engine, pool by pool."""
        return [Engine(f"{pool.name}-{i}", pool) for pool in self.pools for i in range(pool.replicas)]

    def warnings(self) -> list[str]:
        """What is allowed and probably not meant, a line each."""
        found = []
        sharing = [engine for engine in self.engines() if engine.pool.offload.mode == "shared"]
        if len(sharing) == 1:
            found.append(
                f"{sharing[0].name} is the only engine of mode shared, with no one to share with; native does the same"
            )
        if self.store is not None and not sharing:
            found.append("store: no pool has offload mode shared, so nothing will use it")
        for index, pool in enumerate(self.pools):
            found += [f"pools[{index}].{field} has no effect {why}" for field, why in _without_effect(pool)]
            chunk_tokens = pool.block_size * pool.offload.blocks_per_chunk
            if pool.offload.mode == "lmcache" and chunk_tokens < LMCACHE_CHUNK_TOKENS:
                found.append(
                    f"pools[{index}].offload.blocks_per_chunk makes chunks of {chunk_tokens} tokens; "
                    f"LMCache's own default is {LMCACHE_CHUNK_TOKENS}"
                )
        return found


def _without_effect(pool: Pool) -> list[tuple[str, str]]:
    """Fields that are set and change nothing, and why."""
    offload = pool.offload
    found = []
    if offload.mode == "none" and "dram_size" in offload.model_fields_set:
        found.append(("offload.dram_size", "in mode none"))
    if offload.mode not in ("native", "shared") and offload.dram_admission != "eager":
        found.append(("offload.dram_admission", f"in mode {offload.mode}"))
    if offload.mode != "shared" and offload.store_admission != "always":
        found.append(("offload.store_admission", f"in mode {offload.mode}"))
    if offload.lookup_timeout_seconds != DEFAULT_LOOKUP_SECONDS and (pool.engine, offload.mode) != ("vllm", "shared"):
        found.append(("offload.lookup_timeout_seconds", f"with engine: {pool.engine} in mode {offload.mode}"))
    if pool.engine == "vllm" and pool.emulator != Emulator():
        found.append(("emulator", "with engine: vllm"))
    if pool.engine == "emulated" and pool.vllm != Vllm():
        found.append(("vllm", "with engine: emulated"))
    return found
