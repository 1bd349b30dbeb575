"""Engines that a name stands for: every address of it is one, as with a headless service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from kvhearth.router.config import EventSource
from kvhearth.router.discovery.member import MOST_MEMBERS, Member
from kvhearth.router.discovery.source import Source, Unavailable

DEADLINE_SECONDS = 5.0
_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


class DnsSource(Source):
    """Resolves ``name:port`` again and again. A name without addresses means that there are no engines; a resolver that
    does not answer means nothing.
    """

    def __init__(self, address: str, interval_seconds: float, kv_events_port: int = 0) -> None:
        super().__init__("dns", interval_seconds)
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._events_port = kv_events_port

    async def look(self) -> Sequence[Member]:
        """See `Source`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError:
            raise Unavailable("timeout", f"{self._host} was not resolved in {DEADLINE_SECONDS:g} s") from None
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return ()
            raise Unavailable("resolver", f"{self._host}: {error.strerror}") from None
        except (OSError, UnicodeError) as error:
            raise Unavailable("resolver", f"{self._host}: {error}") from None
        hosts = sorted({str(address[0]) for *_, address in found})
        return [self._member(host) for host in hosts[:MOST_MEMBERS]]

    def _member(self, host: str) -> Member:
        shown = f"[{host}]" if ":" in host else host
        events = EventSource(f"tcp://{shown}:{self._events_port}") if self._events_port else None
        return Member(f"{shown}:{self._port}", f"http://{shown}:{self._port}", events=events)
