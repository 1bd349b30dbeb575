"""The pool's register in the store: each engine says what its namespace is, and is told where it differs from others.

Engines that cannot share would otherwise find out by zero hits. The record is refreshed while an engine lives, so that
one of an engine long gone counts for nothing.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid

from kvhearth.connector.namespace import Namespace
from kvhearth.connector.threads import start_thread
from kvhearth.errors import UserError
from kvhearth.store.client.client import StoreClient
from kvhearth.store.ring.client import StoreRing

REFRESH_SECONDS = 15.0
STALE_SECONDS = 60.0
_CALL_SECONDS = 0.5
_MEANT_EQUAL = ("hash", "hash_seed")
"""Fields in which nobody wants two engines of a pool to differ, not even while one version replaces another."""

_log = logging.getLogger(__name__)


class PoolRegister:
    """One engine's entry, looked after by a thread of its own.

    Args:
        client: the store; used from the thread, and once by `check_at_start`.
        pool: the pool's name; empty: no register.
        namespace: this engine's.
    """

    def __init__(self, client: StoreClient | StoreRing, pool: str, namespace: Namespace) -> None:
        self._client = client
        self._pool = pool
        self._namespace = namespace
        self._engine = uuid.uuid4().hex
        self._differing: list[str] = []
        self._private = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def differing(self) -> list[str]:
        """Fields in which this engine differs from its pool, as last seen."""
        return list(self._differing)

    def check_at_start(self) -> None:
        """Look once, before serving; a store that does not answer is no error.

        Raises:
            UserError: engines of the pool hash blocks in another way, which is never meant.
        """
        if not self._pool:
            return
        other = self._look()
        wrong = [name for name in self._differing if name in _MEANT_EQUAL]
        if other is not None and wrong:
            theirs, ours = other.fields.get(wrong[0]), self._namespace.fields.get(wrong[0])
            raise UserError(
                f"{wrong[0]} is {ours!r} here and {theirs!r} in the other engines of the pool, so no key would match",
                where=f"pool {self._pool}",
                remedy="give all of them the same --prefix-caching-hash-algo and PYTHONHASHSEED",
            )

    def start(self) -> None:
        """Keep the record fresh from now on."""
        if self._pool:
            self._thread = start_thread(self._run, "register")

    def change(self, namespace: Namespace) -> None:
        """The engine's namespace is another from now on."""
        with self._changed:
            self._namespace = namespace
            self._private = True  # the others' namespace is not this one, so the pool's record is theirs to keep
            self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                _log.exception("cannot look after the register of pool %s", self._pool)
            with self._changed:
                if not self._closed:
                    self._changed.wait(REFRESH_SECONDS)
                if self._closed:
                    return

    def _look(self) -> Namespace | None:
        """Read the pool's record and compare; write ours where there is no other of late. Returns the other's."""
        ours = self._namespace
        key = f"kvhearth:pool:{self._pool}".encode()
        other, age = self._read(key)
        if other is not None and other.fields != ours.fields and age < STALE_SECONDS:
            self._tell(ours.differences(other), other)
            return other
        self._tell([], ours)
        if not self._private:
            self._write(key, ours)
        self._write(f"kvhearth:namespace:{ours.digest()}".encode(), ours)
        return None

    def _tell(self, differing: list[str], other: Namespace) -> None:
        if differing != self._differing:
            self._differing = differing
            if differing:
                details = ", ".join(
                    f"{name} ({self._namespace.fields.get(name)!r} here, {other.fields.get(name)!r} there)"
                    for name in differing
                )
                _log.error("this engine shares nothing with its pool %s: they differ in %s", self._pool, details)
            else:
                _log.info("this engine shares with its pool %s", self._pool)

    def _read(self, key: bytes) -> tuple[Namespace | None, float]:
        found = self._client.get_record(key, timeout_seconds=_CALL_SECONDS).record
        if found is None:
            return None, 0.0
        try:
            record = json.loads(found)
            if record.get("engine") == self._engine:
                return None, 0.0
            return Namespace.from_json(json.dumps(record["fields"])), abs(time.time() - float(record["seen_at"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, 0.0

    def _write(self, key: bytes, namespace: Namespace) -> None:
        record = {"fields": dict(namespace.fields), "seen_at": time.time(), "engine": self._engine}
        self._client.put_record(key, json.dumps(record, sort_keys=True).encode(), timeout_seconds=_CALL_SECONDS)
