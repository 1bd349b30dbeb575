"""What a client asks about many keys at once: in our own commands, or in Redis's where the store is a Redis."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.packed import pack_keys

_DRAM = b"d"
_ABSENT = b"-"
_REPLY_BYTES = 64 * 1024


class Questions:
    """Asks one store, and remembers whether it knows our commands. Every method raises `Miss`."""

    def __init__(self) -> None:
        self._knows_ours = True

    def leading(self, wire: WireConnection, keys: Sequence[bytes], deadline: float) -> bytes:
        """The tier of each leading key that is there, a letter each."""
        letters = self._ask_letters(wire, b"KV.MATCH", keys, deadline)
        if letters is None:
            letters = _exists_one_by_one(wire, keys, deadline)
            letters = letters[: letters.index(_ABSENT)] if _ABSENT in letters else letters
        return letters

    def where(self, wire: WireConnection, keys: Sequence[bytes], deadline: float) -> bytes:
        """The tier of each key, a letter each; ``-`` for none."""
        letters = self._ask_letters(wire, b"KV.EXISTS", keys, deadline)
        if letters is None:
            return _exists_one_by_one(wire, keys, deadline)
        if len(letters) != len(keys):
            raise Miss(MissReason.PROTOCOL, f"{len(letters)} answers for {len(keys)} keys")
        return letters

    def number(self, wire: WireConnection, command: Sequence[bytes], keys: Sequence[bytes], deadline: float) -> int:
        """What a command of ours, with arguments before its keys, counts (KV.PIN, KV.PREFETCH); 0 where the store does
        not know it."""
        if not self._ask(wire, command, keys, deadline):
            return 0
        try:
            number = wire.integer(deadline)
        except Miss as miss:
            self._note_unknown(miss)
            return 0
        if number > len(keys):
            raise Miss(MissReason.PROTOCOL, f"{number} of {len(keys)} keys")
        return number

    def _ask_letters(
        self, wire: WireConnection, command: bytes, keys: Sequence[bytes], deadline: float
    ) -> bytes | None:
        if not self._ask(wire, [command], keys, deadline):
            return None
        try:
            length = wire.bulk_length(deadline) or 0
        except Miss as miss:
            self._note_unknown(miss)
            return None
        if length > min(len(keys), _REPLY_BYTES):
            raise Miss(MissReason.PROTOCOL, f"{length} answers for {len(keys)} keys")
        letters = bytearray(length)
        wire.read_into([memoryview(letters)], deadline)
        wire.crlf(deadline)
        return bytes(letters)

    def _ask(self, wire: WireConnection, command: Sequence[bytes], keys: Sequence[bytes], deadline: float) -> bool:
        if self._knows_ours:
            packed = pack_keys(keys)
            wire.send([encode_command(*command, *(keys if packed is None else [packed]))], deadline)
        return self._knows_ours

    def _note_unknown(self, miss: Miss) -> None:
        if not miss.detail.startswith("ERR unknown command"):
            raise miss
        self._knows_ours = False


def _exists_one_by_one(wire: WireConnection, keys: Sequence[bytes], deadline: float) -> bytes:
    wire.send([b"".join([encode_command(b"EXISTS", key) for key in keys])], deadline)
    return b"".join([_DRAM if wire.integer(deadline) > 0 else _ABSENT for _ in keys])
