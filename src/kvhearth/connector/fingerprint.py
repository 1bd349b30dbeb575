"""From vLLM's configuration to a `Namespace`: every fact of an engine that its KV bytes depend on."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import xxhash

from kvhearth.connector.namespace import Namespace
from kvhearth.connector.weights import digest_directory
from kvhearth.errors import UserError

_NOT_KV = ("_name_or_path", "transformers_version", "architectures", "auto_map", "_commit_hash", "name_or_path")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "max_position_embeddings")
_RANDOM_SEEDED = ("xxhash", "xxhash_cbor")


def fingerprint(
    vllm_config: Any, kv_cache_config: Any, *, agnostic: bool, weights: str, epoch: str, isa: str | None = None
) -> Namespace:
    """The namespace of an engine.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: its ``KVCacheConfig``: groups, specs and layers.
        agnostic: rows are the same bytes under any parallelism (``canonical_layout``, certified).
        weights: names the weights; empty: they are told from their files.
        epoch: the weights epoch.
        isa: instruction set of the processor; None: as found.

    Raises:
        UserError: block hashes are seeded at random, or the weights cannot be told.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    refuse_random_seed(cache.prefix_caching_hash_algo)
    text_config = _plain(model.hf_config)
    fields = {
        "weights": weights or weights_identity(model, vllm_config.load_config),
        "epoch": epoch,
        "architecture": _digest(text_config),
        # Long RoPE chooses its factors by the longest request that the engine accepts.
        "rope": _text({name: v for name, v in _flat(text_config) if name in _ROPE} | {"max": model.max_model_len}),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "kv_layout": str(getattr(cache, "kv_cache_layout", None)),
        "kv_groups": _groups(kv_cache_config),
        "block_size": str(cache.block_size),
        "blocks_per_chunk": str(_chunk_blocks(vllm_config)),
        "hash": str(cache.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        "parallelism": "any" if agnostic else _parallelism(parallel),
        "canonical_layout": str(bool(vllm_config.kv_transfer_config.kv_connector_extra_config.get("canonical_layout"))),
        "speculation": _speculation(vllm_config),
        "multimodal": _text(getattr(model.multimodal_config, "mm_processor_kwargs", None)),
        "platform": _platform(isa),
        "vllm": _vllm_series(),
    }
    return Namespace(fields)


def refuse_random_seed(algorithm: str) -> None:
    """Raises UserError for a hash whose seed vLLM draws at random, so that no other process has the same keys."""
    if algorithm in _RANDOM_SEEDED and os.environ.get("PYTHONHASHSEED") in (None, "random"):
        raise UserError(
            f"{algorithm} hashes blocks with a seed that differs in every process, so nothing could be shared",
            where="--prefix-caching-hash-algo",
            remedy="set the environment variable PYTHONHASHSEED=0 for every engine of the pool, or use sha256_cbor",
        )


def weights_identity(model: Any, load_config: Any) -> str:
    """Which weights the engine serves: a commit, or a digest of the files. Raises UserError when it cannot be told."""
    load_format = str(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        return f"dummy:{model.model}:{model.seed}"
    path = Path(model.model)
    if not path.is_dir():
        found = _snapshot(model.model, model.revision, getattr(load_config, "download_dir", None))
        if found is None:
            raise UserError(
                f"cannot tell which weights {model.model!r} are: no files of theirs are on this machine",
                where="kv_connector_extra_config.secondary_tiers[kvhearth].weights",
                remedy="name them there, such as by version, and name them anew whenever they change",
            )
        path = found
    digest = digest_directory(path)
    if digest is None:
        raise UserError(
            f"cannot tell which weights are served: {path} holds no weight files",
            where="kv_connector_extra_config.secondary_tiers[kvhearth].weights",
            remedy="name them there, such as by version, and name them anew whenever they change",
        )
    loader = getattr(load_config, "model_loader_extra_config", None)
    return f"{digest} {load_format} {_text(loader)}" if loader else f"{digest} {load_format}"


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    from huggingface_hub import snapshot_download  # comes with vLLM

    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # whatever it is that it lacks, the files are not here
        return None


def _plain(hf_config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(hf_config.to_dict(), default=str, sort_keys=True))
    return found


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Items of the config and of its ``text_config`` and the like, by their own names."""
    items = list(config.items())
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config"):
            items += _flat(value, name)
    return items


def _digest(config: dict[str, Any]) -> str:
    kept = {name: value for name, value in config.items() if name not in _NOT_KV}
    return str(xxhash.xxh3_64_hexdigest(_text(kept).encode()))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))


def _groups(kv_cache_config: Any) -> str:
    groups = [[sorted(group.layer_names), repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups]
    return str(xxhash.xxh3_64_hexdigest(_text(groups).encode()))


def _chunk_blocks(vllm_config: Any) -> int:
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    if extra.get("blocks_per_chunk") is not None:
        return int(extra["blocks_per_chunk"])
    if extra.get("block_size") is not None:
        return int(extra["block_size"]) // int(vllm_config.cache_config.block_size)
    return 1


def _hash_seed(algorithm: str) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    # A pickled hash may differ between Python versions; the CBOR ones are the same everywhere.
    python = "" if algorithm.endswith("_cbor") else f" python{sys.version_info.major}.{sys.version_info.minor}"
    return f"{'default' if seed is None else seed}{python}"


def _speculation(vllm_config: Any) -> str:
    """A draft model's layers have KV of their own in the same chunks."""
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    return "" if draft is None else f"{speculative.method} {weights_identity(draft, vllm_config.load_config)}"


def _parallelism(parallel: Any) -> str:
    names = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "cp_kv_cache_interleave_size",
    )
    return ",".join(f"{name.removesuffix('_size')}={getattr(parallel, name, 1)}" for name in names)


def _platform(isa: str | None) -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        capability = current_platform.get_device_capability()
        return f"{current_platform.device_type} {capability.as_version_str() if capability else '?'}"
    return f"cpu {platform.machine()} {isa if isa is not None else _cpu_isa()}"


def _cpu_isa() -> str:
    """The vector extensions that vLLM's CPU kernels choose by; a finer name costs a hit, a coarser one wrong bytes."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "unknown"
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16", "sve", "i8mm")
    flags = set(line.partition(":")[2].split())
    return "+".join(name for name in wanted if name in flags) or "generic"


def _vllm_series() -> str:
    import vllm

    return ".".join(str(vllm.__version__).split(".")[:2])
