"""What a client asks about many keys at once: in our own commands, or in Redis's where the store is a Redis."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.store.outcomes import Miss, MissReason
from kvhearth.store.wire import WireConnection, encode_command


class Questions:
    """Asks one store, and remembers whether it knows our commands. Every method raises `Miss`."""

    def __init__(self) -> None:
        self._knows_ours = True

    def match(self, wire: WireConnection, keys: Sequence[bytes], deadline: float) -> int:
        """How many leading ``keys`` there are."""
        matched = self._ask_number(wire, b"KV.MATCH", keys, deadline)
        if matched is not None:
            return matched
        present = _exists_one_by_one(wire, keys, deadline)
        return present.index(False) if False in present else len(present)

    def exists(self, wire: WireConnection, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Whether each of ``keys`` is there."""
        if not self._ask(wire, b"KV.EXISTS", keys, deadline):
            return _exists_one_by_one(wire, keys, deadline)
        try:
            length = wire.array_length(deadline)
        except Miss as miss:
            self._note_unknown(miss)
            return _exists_one_by_one(wire, keys, deadline)
        if length != len(keys):
            raise Miss(MissReason.PROTOCOL, f"{length} answers for {len(keys)} keys")
        return [wire.integer(deadline) > 0 for _ in keys]

    def set_pins(self, wire: WireConnection, command: bytes, keys: Sequence[bytes], deadline: float) -> int:
        """KV.PIN or KV.UNPIN; 0 where the store knows neither."""
        return self._ask_number(wire, command, keys, deadline) or 0

    def _ask_number(self, wire: WireConnection, command: bytes, keys: Sequence[bytes], deadline: float) -> int | None:
        if not self._ask(wire, command, keys, deadline):
            return None
        try:
            number = wire.integer(deadline)
        except Miss as miss:
            self._note_unknown(miss)
            return None
        if number > len(keys):
            raise Miss(MissReason.PROTOCOL, f"{number} of {len(keys)} keys")
        return number

    def _ask(self, wire: WireConnection, command: bytes, keys: Sequence[bytes], deadline: float) -> bool:
        if self._knows_ours:
            wire.send([encode_command(command, *keys)], deadline)
        return self._knows_ours

    def _note_unknown(self, miss: Miss) -> None:
        if not miss.detail.startswith("ERR unknown command"):
            raise miss
        self._knows_ours = False


def _exists_one_by_one(wire: WireConnection, keys: Sequence[bytes], deadline: float) -> list[bool]:
    wire.send([b"".join([encode_command(b"EXISTS", key) for key in keys])], deadline)
    return [wire.integer(deadline) > 0 for _ in keys]
