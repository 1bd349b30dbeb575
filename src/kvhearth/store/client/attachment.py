"""A client's attachment to the store's memory: which of its connections may be lent pieces of it, and the mapping that
they share. Not the copying (`mapping`), nor the lending (`lent_rows`).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref

from kvhearth.store.client.mapping import Mapping, MappingError, identity_of
from kvhearth.store.client.outcomes import Miss, MissReason
from kvhearth.store.client.wire import WireConnection, encode_command

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class Attachment:
    """Thread-safe. The mapping is made once and let go when no connection that has attached to it is left: a store that
    is gone then gets its memory back, though this client asks nothing of it any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_wire: weakref.WeakKeyDictionary[WireConnection, Mapping | None] = weakref.WeakKeyDictionary()
        self._mapping: Mapping | None = None
        self._closed = False

    def of(self, wire: WireConnection, deadline: float) -> Mapping | None:
        """The store's memory, if what is lent over ``wire`` may be used in it; None: values travel over ``wire``. Asks
        the store once a connection.

        Raises:
            Miss: the connection cannot go on.
        """
        with self._lock:
            if wire in self._by_wire:
                return self._by_wire[wire]
        mapping = self._attach(wire, deadline)
        with self._lock:
            if not self._closed:
                self._by_wire[wire] = mapping
        return mapping

    def close(self) -> None:
        """Let the mapping go, as soon as calls in progress are over."""
        with self._lock:
            self._closed = True
            self._by_wire.clear()
            self._mapping = None

    def _attach(self, wire: WireConnection, deadline: float) -> Mapping | None:
        wire.send([encode_command(b"KV.ATTACH")], deadline)
        try:
            nbytes, fd = wire.integer_with_descriptor(deadline)
        except Miss as miss:
            if miss.reason is not MissReason.REFUSED:
                raise
            return None
        if fd is None:
            return None
        try:
            return self._map(fd, nbytes)
        except MappingError as error:
            _log.warning("the store's memory cannot be shared: %s", error)
            return None
        finally:
            os.close(fd)

    def _map(self, fd: int, nbytes: int) -> Mapping:
        with self._lock:
            if self._mapping is not None and self._mapping.identity == identity_of(fd):
                return self._mapping
            mapping = Mapping(fd, nbytes)
            if not self._closed:
                self._tended(mapping)
            return mapping

    def _tended(self, mapping: Mapping) -> None:
        self._mapping = mapping
        thread = threading.Thread(target=self._tend, args=(mapping,), name="kvhearth-store-mapping", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._mapping = None
            raise MappingError(str(error)) from None

    def _tend(self, mapping: Mapping) -> None:
        """Fault the mapping in, then wait for the last of its connections to end."""
        mapping.fault_in(lambda: self._mapping is not mapping)
        while self._mapping is mapping:
            gone = _wait_for_hangups(self._wires(mapping))
            with self._lock:
                for wire in gone:
                    self._by_wire.pop(wire, None)
                if mapping is self._mapping and mapping not in self._by_wire.values():
                    self._mapping = None

    def _wires(self, mapping: Mapping) -> list[WireConnection]:
        with self._lock:
            return [wire for wire, theirs in self._by_wire.items() if theirs is mapping]


def _wait_for_hangups(wires: list[WireConnection]) -> list[WireConnection]:
    """Those whose other end is gone or that are closed; waits a while for one."""
    by_fd = {wire.fileno(): wire for wire in wires}
    closed = [wire for wire in wires if wire.fileno() < 0]
    poll = select.poll()
    for fd in by_fd:
        if fd >= 0:
            poll.register(fd, select.POLLRDHUP)
    return closed + [by_fd[fd] for fd, _ in poll.poll(0 if closed else _LOOK_SECONDS * 1000)]
