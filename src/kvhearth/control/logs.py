"""A child's log file, kept from growing without bound. The child writes it itself; this only trims and reads."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_TAIL_BYTES = 8192
_CAUSE_BYTES = 1 << 18
_OWN_ERROR = "kvhearth: error: "
_CAUSE_ABOVE = "root cause"
"""vLLM's server and its engine core point back with this to what went wrong, in the words of the process before."""
_EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .*")


class BoundedLog:
    """One file that a child appends to, and one older generation beside it (``NAME.log.1``).

    The child keeps its descriptor for life, so past the limit the text is copied to the older generation and the file
    emptied in place; appending (O_APPEND) then goes on at its start. At most twice the limit, plus what is written
    between two calls of `trim`, is on disk; lines written during the copy can be lost.
    """

    def __init__(self, path: Path, limit_bytes: int = 8 << 20) -> None:
        self.path = path
        self._limit_bytes = limit_bytes

    def open_for_child(self) -> int:
        """A descriptor for the child's stdout and stderr; the caller closes it once the child has it."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def trim(self) -> None:
        """Empty the file if it has passed its limit, keeping its end as the older generation."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size <= self._limit_bytes:
            return
        older = self.path.with_name(self.path.name + ".1")
        with self.path.open("rb") as source, older.open("wb") as target:
            source.seek(size - self._limit_bytes)
            shutil.copyfileobj(source, target)
        os.truncate(self.path, 0)

    def tail(self, lines: int = 10, nbytes: int = _TAIL_BYTES) -> list[str]:
        """The last lines that are not blank, oldest first; none from before the last ``nbytes``."""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - nbytes))
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def last_error(self) -> str:
        """The child's own account of its end: its last ``kvhearth: error:`` line, else the exception that its last
        words point back to, else its last line, else ""."""
        lines = self.tail(50)
        own = [line.partition(_OWN_ERROR)[2] for line in lines if _OWN_ERROR in line]
        if own:
            return own[-1]
        if any(_CAUSE_ABOVE in line for line in lines):
            found = [_EXCEPTION.search(line) for line in self.tail(5000, _CAUSE_BYTES) if _CAUSE_ABOVE not in line]
            causes = [match[0] for match in found if match]
            if causes:
                return causes[-1]
        return lines[-1].strip() if lines else ""
