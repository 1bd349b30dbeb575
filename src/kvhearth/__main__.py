"""``python -m kvhearth``: the command line, for places where the script is not on the path (child processes)."""

from __future__ import annotations

from kvhearth.cli.main import main

if __name__ == "__main__":
    main()
