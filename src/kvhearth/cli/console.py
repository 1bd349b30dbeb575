"""What every verb prints with: the two consoles, progress bars and the house's table style. No verb logic."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

out = Console(highlight=False, soft_wrap=False)
"""Results. Rich drops colour by itself when stdout is not a terminal, or when NO_COLOR is set."""

err = Console(stderr=True, highlight=False)
"""Progress, warnings and errors, so that stdout can be piped."""


def progress(*, transient: bool = True, percent: bool = True) -> Progress:
    """A progress display on stderr for anything that takes over two seconds; silent when stderr is not a terminal.

    Args:
        transient: take the bars away when done.
        percent: show a percentage; False shows "3/4" instead, for a handful of things.
    """
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TaskProgressColumn() if percent else MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=transient,
        disable=not err.is_terminal,
    )


def table(*columns: str, title: str = "", right: Sequence[str] = ()) -> Table:
    """An empty table in the house's style; columns named in ``right`` (figures) are set flush right."""
    made = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def warn(message: str) -> None:
    """One line on stderr: something the user may want to change, and can live with."""
    err.print(f"[yellow]warning:[/] {_escape(message)}", soft_wrap=True)


def error(message: str) -> None:
    """One line on stderr: why the command ends."""
    err.print(f"[red]kvhearth: error:[/] {_escape(' '.join(message.split()))}", soft_wrap=True)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")
