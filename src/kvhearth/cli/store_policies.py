"""``kvhearth store policies``: hit rates of the eviction policies on a recorded workload, by capacity, beside the
optimum. Asks no store.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvhearth.cli import console
from kvhearth.errors import UserError
from kvhearth.planner.sessions import read_sessions
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import Workload, content_chain
from kvhearth.store.hit_rates import BELADY, ChunkTrace, HitRate, play_all
from kvhearth.store.policies import DEFAULT_POLICY, POLICY_NAMES
from kvhearth.units import format_bytes, parse_bytes

_DEFAULT_CAPACITIES = ("1%", "2%", "5%", "10%", "20%", "30%", "50%", "70%", "100%")
_WORTH_SHARING = 200_000  # lookups times runs from which on processes pay for their start
_COLOURS = {"kv-aware": "#0072b2", "lru": "#e69f00", "s3-fifo": "#009e73", BELADY: "#8c8c8c"}


def policies(
    *,
    trace: Annotated[
        Path, typer.Option(help="A Mooncake trace (JSONL), or a folder of agent sessions (JSON).", metavar="PATH")
    ],
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="Capacity to try, as a share of all the trace's chunks (5%) or in bytes (64GiB); may be repeated.",
            show_default=", ".join(_DEFAULT_CAPACITIES),
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policy to try; may be repeated.", show_default=", ".join(POLICY_NAMES))
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a chunk.")] = 512,
    token_bytes: Annotated[
        str, typer.Option(help="KV bytes of a token; the default is Llama-3.1-8B's in 16 bits.")
    ] = "128KiB",  # noqa: S107
    requests: Annotated[int | None, typer.Option(min=1, help="Play only the first so many requests.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).", metavar="FILE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print what each eviction policy would hit on a trace, by capacity, beside the unreachable optimum (Belady).

    Hits are chunks of prompts that are held together with all that precedes them. The gap is what the default policy
    leaves to the optimum, which knows the future.
    """
    names = list(dict.fromkeys(policy or POLICY_NAMES))
    for name in names:
        if name not in POLICY_NAMES:
            raise UserError(f"there is no policy {name!r}", where="--policy", remedy=f"use {', '.join(POLICY_NAMES)}")
    if plot is not None and not plot.parent.is_dir():
        raise UserError("its folder does not exist", where=str(plot), remedy="create it first")
    chunk_bytes = chunk_tokens * parse_bytes(token_bytes, where="--token-bytes")
    if not 0 < chunk_bytes < 1 << 32:
        raise UserError(f"a chunk has {chunk_bytes:,} bytes", where="--token-bytes", remedy="stay below 4GiB a chunk")
    workload = read_sessions(trace) if trace.is_dir() else read_mooncake(trace)
    played = ChunkTrace.of(_prompts(workload, chunk_tokens, requests), chunk_bytes)
    capacities = sorted({_chunks(text, played) for text in capacity or _DEFAULT_CAPACITIES})
    rates = _play(played, [*names, BELADY], capacities)
    shown = names[0] if DEFAULT_POLICY not in names else DEFAULT_POLICY
    if as_json:
        json.dump(_page(workload, played, rates, shown), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        console.out.print(
            f"[bold]{workload.name}[/]: {workload.note}; {played.lookups:,} chunks of {chunk_tokens} tokens looked up, "
            f"{played.distinct:,} different ones ({format_bytes(played.distinct * chunk_bytes)}).",
            soft_wrap=True,
        )
        console.out.print(_table(played, names, capacities, rates, shown))
    if plot is not None:
        _draw(played, capacities, rates, workload.name, plot)
        if not as_json:
            console.out.print(f"Written: {plot}", soft_wrap=True)


Rates = dict[tuple[str, int], HitRate]


def _prompts(workload: Workload, chunk_tokens: int, requests: int | None) -> Iterator[list[int]]:
    """The chunks of each prompt, in the order of arrival. A chain's hash is 0 once in 2**64; 1 then stands for it."""
    for user in sorted(workload.users, key=lambda user: user.start_ns)[:requests]:
        for turn in user.turns:
            yield [fingerprint or 1 for fingerprint in content_chain(turn.segments, chunk_tokens)]


def _chunks(text: str, trace: ChunkTrace) -> int:
    """A capacity in chunks.

    Raises:
        UserError: neither a share in (0 %, 100 %] nor bytes for at least one chunk.
    """
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(
                f"{text!r} is no share above 0% and up to 100%", where="--capacity", remedy="give 5% or 64GiB"
            )
        return max(1, int(share * trace.distinct))
    chunks = parse_bytes(text, where="--capacity") // trace.chunk_bytes
    if not chunks:
        raise UserError(
            f"{text} hold no chunk of {format_bytes(trace.chunk_bytes)}", where="--capacity", remedy="give more"
        )
    return chunks


def _play(trace: ChunkTrace, names: Sequence[str], capacities: Sequence[int]) -> Rates:
    runs = len(names) * len(capacities)
    processes = min(os.cpu_count() or 1, runs) if trace.lookups * runs > _WORTH_SHARING else 1
    with console.progress() as bar:
        task = bar.add_task("playing", total=runs)
        rates = play_all(trace, names, capacities, processes=processes, on_done=lambda: bar.advance(task))
    return {(rate.policy, rate.capacity_chunks): rate for rate in rates}


def _gap(rates: Rates, policy: str, capacity: int) -> float:
    """What a policy leaves to the optimum, as a share of lookups."""
    return rates[BELADY, capacity].share - rates[policy, capacity].share


def _table(trace: ChunkTrace, names: Sequence[str], capacities: Sequence[int], rates: Rates, shown: str) -> Table:
    columns = ["capacity", "", "chunks", *names, BELADY, f"gap of {shown}"]
    table = console.table(*columns, right=columns, title="Hit rate by eviction policy")
    for capacity in capacities:
        best = max(rates[name, capacity].hits for name in names)
        cells = [f"{rates[name, capacity].share:.2%}" for name in names]
        marked = [
            f"[bold]{cell}[/]" if rates[name, capacity].hits == best else cell
            for name, cell in zip(names, cells, strict=True)
        ]
        table.add_row(
            f"{capacity / trace.distinct:.1%}",
            format_bytes(capacity * trace.chunk_bytes),
            f"{capacity:,}",
            *marked,
            f"{rates[BELADY, capacity].share:.2%}",
            f"{_gap(rates, shown, capacity) * 100:.2f} points",
        )
    return table


def _page(workload: Workload, trace: ChunkTrace, rates: Rates, shown: str) -> dict[str, object]:
    return {
        "trace": {"name": workload.name, "note": workload.note, "lookups": trace.lookups, "chunks": trace.distinct},
        "chunk_bytes": trace.chunk_bytes,
        "policy": shown,
        "hit_rates": [
            {
                "policy": rate.policy,
                "capacity_chunks": rate.capacity_chunks,
                "capacity_bytes": rate.capacity_chunks * trace.chunk_bytes,
                "hits": rate.hits,
                "hit_rate": rate.share,
                "gap_to_belady": _gap(rates, rate.policy, rate.capacity_chunks),
            }
            for rate in rates.values()
        ],
    }


def _draw(trace: ChunkTrace, capacities: Sequence[int], rates: Rates, title: str, path: Path) -> None:
    """Raises:
    UserError: the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UserError("needs matplotlib", where="--plot", remedy="pip install 'kvhearth[planner]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    sizes = [capacity / trace.distinct * 100 for capacity in capacities]
    for name in dict.fromkeys(policy for policy, _ in rates):
        shares = [rates[name, capacity].share * 100 for capacity in capacities]
        axes.plot(sizes, shares, "--" if name == BELADY else "o-", color=_COLOURS[name], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, % of all chunks of the trace")
    axes.set_ylabel("hit rate, % of the chunks looked up")
    axes.set_title(f"{title}: hits by eviction policy")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(
            f"cannot be written ({error.strerror})", where=str(path), remedy="give another --plot"
        ) from None
    finally:
        plt.close(figure)
