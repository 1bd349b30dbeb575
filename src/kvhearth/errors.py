"""The one error a user is meant to read: what was wrong, where, and what to do about it.

Rooms raise it; borders translate it (CLI: one line and exit code 2; HTTP: OpenAI's error form; RESP: ``-ERR``).
"""

from __future__ import annotations


class UserError(Exception):
    """Input or surroundings that the user can put right.

    Args:
        what: what is wrong, with the offending value.
        where: the field, file or address it was found at.
        remedy: what to do about it, in the imperative.
    """

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what = what
        self.where = where
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}; {self.remedy}" if self.remedy else line
