"""``kvhearth emulator``: runs one emulated engine. Parses flags and prints one line; the work is in `emulator`."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvhearth.cli.secrets import EMULATOR_KEY_VARIABLE, STORE_PASSWORD_VARIABLE, read_secret
from kvhearth.engine.ports import OffloadMode
from kvhearth.errors import UserError
from kvhearth.store.open import open_store
from kvhearth.store.protocol.address import parse_address
from kvhearth.units import format_bytes, parse_bytes

_STORE_CHECK_SECONDS = 2.0


class Admission(Enum):
    """When a chunk goes to DRAM."""

    EAGER = "eager"
    LAZY = "lazy"


app = typer.Typer(help="A vLLM-compatible engine without GPU or weights.", no_args_is_help=True)


@app.callback()
def emulator() -> None:
    """A vLLM-compatible engine without GPU or weights."""


@app.command()
def serve(
    *,
    model: Annotated[str, typer.Option(help="A model of the catalog, or the path of a config.json.")],
    gpu: Annotated[str, typer.Option(help="A GPU of the catalog.")] = "h100-sxm",
    listen: Annotated[str, typer.Option(help="host:port; port 0 takes a free one.")] = "127.0.0.1:8001",
    port: Annotated[int | None, typer.Option(help="Short for --listen 127.0.0.1:PORT.")] = None,
    served_model_name: Annotated[str, typer.Option(help="What clients call the model; by default as --model.")] = "",
    engine_id: Annotated[str, typer.Option(help="The label `engine` of its metrics.")] = "0",
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs of the engine.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option(help="KV blocks in HBM, instead of what its memory gives.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of HBM for weights and KV.")] = 0.92,
    max_num_seqs: Annotated[int, typer.Option(help="Requests running at once.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 8192,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output; by default 131072, or what HBM holds.")
    ] = None,
    offload_mode: Annotated[OffloadMode, typer.Option(help="Where KV goes when it leaves HBM.")] = OffloadMode.NONE,
    dram_size: Annotated[
        str, typer.Option("--dram-size", "--dram-bytes", help="DRAM tier, of modelled KV, such as 64GiB.")
    ] = "64GiB",
    blocks_per_chunk: Annotated[int, typer.Option(help="KV blocks moved and stored as one unit.")] = 1,
    dram_admission: Annotated[
        Admission, typer.Option(help="When a chunk goes to DRAM: once computed, or once its blocks are needed.")
    ] = Admission.EAGER,
    store: Annotated[
        str | None,
        typer.Option(help=f"Mode shared: host:port or unix:/path; {STORE_PASSWORD_VARIABLE} for its password."),
    ] = None,
    store_may_be_down: Annotated[
        bool, typer.Option("--store-may-be-down", help="Start although the store does not answer; miss until it does.")
    ] = False,
    store_bytes_scale: Annotated[int, typer.Option(help="One real byte goes to the store for so many of KV.")] = 1024,
    store_link: Annotated[str, typer.Option(help="The link to the store that is modelled.")] = "ethernet-100g",
    store_deadline_seconds: Annotated[float, typer.Option(help="For each call of the store, of the wall clock.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Emulated seconds in one second of the wall clock.")] = 1.0,
    stream_interval: Annotated[int, typer.Option(help="Tokens a streamed piece, after the first token.")] = 1,
    data_parallel_size: Annotated[int, typer.Option(help="Ranks behind the port, each an engine of its own.")] = 1,
    lora_modules: Annotated[list[str] | None, typer.Option(help="NAME=PATH of an adapter; may be repeated.")] = None,
    kv_events_config: Annotated[str | None, typer.Option(help="KV events over ZeroMQ: JSON as vLLM takes it.")] = None,
    self_describing_kv_events: Annotated[
        bool, typer.Option("--self-describing-kv-events", help="Events of DRAM and the store tell blocks and tokens.")
    ] = False,
    prefix_caching_hash_algo: Annotated[
        str | None, typer.Option(help="vLLM's block hashes, such as sha256_cbor; seeded by PYTHONHASHSEED.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the API key that clients must send; or set {EMULATOR_KEY_VARIABLE}.")
    ] = None,
) -> None:
    """Serve an emulated engine until SIGTERM or SIGINT.

    Times are those of the cost model, by a clock that runs --time-scale times as fast as the wall's.

    Example: kvhearth emulator serve --model llama-3.1-8b --gpu h100 --port 8001 --num-gpu-blocks-override 4000
    """
    from kvhearth.emulator.config import EmulatorConfig
    from kvhearth.emulator.publisher import parse_kv_events_config
    from kvhearth.emulator.serve import Emulator

    address = parse_address(listen if port is None else f"127.0.0.1:{port}", where="listen")
    if address.is_unix:
        raise UserError(f"{listen} is a socket file", where="listen", remedy="write host:port")
    config = EmulatorConfig(
        model=model,
        gpu=gpu,
        host=address.host,
        port=address.port,
        served_model_name=served_model_name,
        engine_id=engine_id,
        tensor_parallel_size=tensor_parallel_size,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        gpu_memory_utilization=gpu_memory_utilization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        offload_mode=offload_mode,
        dram_bytes=parse_bytes(dram_size, where="dram_size"),
        blocks_per_chunk=blocks_per_chunk,
        dram_admission="lazy" if dram_admission is Admission.LAZY else "eager",
        store=store,
        store_password=read_secret(None, STORE_PASSWORD_VARIABLE, option=""),
        store_bytes_scale=store_bytes_scale,
        store_link=store_link,
        store_deadline_seconds=store_deadline_seconds,
        time_scale=time_scale,
        stream_interval=stream_interval,
        data_parallel_size=data_parallel_size,
        lora_modules=tuple((name, path) for name, _, path in (item.partition("=") for item in lora_modules or ())),
        kv_events=None if kv_events_config is None else parse_kv_events_config(kv_events_config),
        self_describing_kv_events=self_describing_kv_events,
        prefix_caching_hash_algo=prefix_caching_hash_algo,
        hash_seed=os.environ.get("PYTHONHASHSEED"),
        api_key=read_secret(api_key_file, EMULATOR_KEY_VARIABLE, option="--api-key-file"),
    )
    if config.store is not None and not store_may_be_down:
        check_store(config.store, config.store_password)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    engine = Emulator(config)
    shape = engine.shape

    def ready() -> None:
        kv = format_bytes(shape.engine.num_blocks * shape.cost.kv_bytes_per_token * block_size)
        typer.echo(
            f"emulator ready on {engine.url}, {shape.limits.name} on {gpu}, {kv} for KV, "
            f"offload {offload_mode.value}, time scale {time_scale:g}"
        )

    engine.run(ready)


def check_store(address: str, password: str | None) -> None:
    """Raises:
    UserError: nobody answers at the store's address, or not to this password.
    """
    with closing(open_store(address, timeout_seconds=_STORE_CHECK_SECONDS, password=password)) as client:
        reason = client.ping()
    if reason is not None:
        raise UserError(
            f"no answer from {address} ({reason.value})",
            where="store",
            remedy="start it with `kvhearth store serve`, or give --store-may-be-down to do without it till then",
        )
