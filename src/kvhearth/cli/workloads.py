"""What `demo` and `simulate` share: the options that name a workload, and the report."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import typer

from kvhearth.errors import UserError
from kvhearth.planner.generate import RECIPES, generate
from kvhearth.planner.report import Comparison, write
from kvhearth.planner.traces import read_mooncake
from kvhearth.planner.workload import Workload

DEFAULT_WORKLOAD = "multi-tenant"

WorkloadOption = Annotated[
    str | None, typer.Option(help=f"What users send: {', '.join(RECIPES)}.", show_default=DEFAULT_WORKLOAD)
]
TraceOption = Annotated[Path | None, typer.Option(help="Play a Mooncake trace (JSONL) instead.", metavar="FILE")]
RequestsOption = Annotated[int | None, typer.Option(min=1, help="Play only the trace's first so many requests.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of a generated workload.")]


def read_workload(name: str | None, trace: Path | None, requests: int | None, seed: int, most_tokens: int) -> Workload:
    """The workload that the options name; of a trace, without requests longer than ``most_tokens``.

    Raises:
        UserError: options that contradict each other, an unknown name, a trace that cannot be read.
    """
    if trace is not None:
        if name is not None:
            raise UserError(f"{name!r} together with --trace", where="--workload", remedy="give one of the two")
        return read_mooncake(trace, requests, max_tokens=most_tokens)
    if requests is not None:
        raise UserError("given without --trace", where="--requests", remedy="add --trace FILE, or leave it out")
    return generate(name or DEFAULT_WORKLOAD, seed)


def check_out(out: Path) -> None:
    """Make the report's folder now, not after all the work.

    Raises:
        UserError: it cannot be made or written into.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise unwritable(out, error) from None


def unwritable(out: Path, error: OSError) -> UserError:
    """What to say when the report cannot be written."""
    return UserError(
        f"cannot write the report ({error.strerror})", where=str(out), remedy="give another folder with --out"
    )


def write_report(comparison: Comparison, out: Path, stem: str) -> list[Path]:
    """Write the report's files and return their paths.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        return write(comparison, out, stem)
    except OSError as error:
        raise unwritable(out, error) from None
