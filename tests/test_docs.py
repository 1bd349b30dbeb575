"""The reference pages are what the code says today."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_reference_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
