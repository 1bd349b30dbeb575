"""``python -m kvhearth.cost`` prints the tables that docs/cost.md shows; the page may not drift from the code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "cost.md"


@pytest.mark.parametrize("table", ["gpus", "links", "models", "published"])
def test_the_page_shows_what_the_command_prints(table: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kvhearth.cost", table], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert printed.count("\n") > 15
    assert printed.strip() in PAGE.read_text(encoding="utf-8"), (
        f"print `python -m kvhearth.cost {table}` into docs/cost.md"
    )


def test_an_unknown_table_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvhearth.cost", "tables"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "published" in done.stderr
