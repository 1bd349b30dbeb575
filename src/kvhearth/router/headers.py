"""Which header lines a proxy passes on (RFC 9110, section 7.6.1), and how a message's head is collected."""

from __future__ import annotations

# Hop-by-hop fields, and those that each side writes anew: framing, Host, Server, Expect, the router's own.
_NOT_FORWARDED = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-data-parallel-rank",
        b"x-kvhearth-decision",
        b"x-kvhearth-engine",
        b"x-kvhearth-hit",
    }
)


class HeaderLines:
    """The header lines of one message after another: those to forward, in order and spelt as they came, and those to
    act on. What comes after `end` are trailers, which are dropped.
    """

    __slots__ = ("_kept", "_names", "_open", "taken")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new message's head."""
        self._names: list[bytes] = []
        self._kept: list[bytes] = []
        self.taken: dict[bytes, bytes] = {}
        self._open = True

    def end(self) -> None:
        """The head is complete."""
        self._open = False

    def add(self, name: bytes, value: bytes) -> None:
        """Take one line. A field that is not forwarded and comes twice is joined with a comma (RFC 9110, 5.3)."""
        if not self._open:
            return
        lower = name.lower()
        if lower in _NOT_FORWARDED:
            before = self.taken.get(lower)
            self.taken[lower] = value if before is None else before + b", " + value
            return
        self._names.append(lower)
        self._kept.append(name + b": " + value + b"\r\n")

    def first(self, lower: bytes) -> bytes | None:
        """Value of the first forwarded line of that name."""
        if lower not in self._names:
            return None
        line = self._kept[self._names.index(lower)]
        return line[len(lower) + 2 : -2]

    def forwarded(self, without: frozenset[bytes] = frozenset()) -> bytes:
        """The lines to forward, without those that ``Connection`` names as meant for this hop only, and without those
        of the names given (in lower case)."""
        connection = self.taken.get(b"connection")
        if connection is not None:
            without = without.union(token.strip() for token in connection.lower().split(b","))
        if without.isdisjoint(self._names):
            return b"".join(self._kept)
        return b"".join(line for name, line in zip(self._names, self._kept, strict=True) if name not in without)
