"""A router with short deadlines, as the fuzz runs it: ``fuzz_router.py POLICY NAME=URL … [NAME=tcp://…]``. Prints its
port, logs to its standard error, and ends at SIGTERM.
"""

from __future__ import annotations

import logging
import sys

import uvloop

from kvhearth.router.config import EventSource, HealthChecks, KvSettings, Limits, RouterConfig, Timeouts
from kvhearth.router.router import Router
from kvhearth.routing.policies.prefix import PrefixSettings

MAX_BODY_BYTES = 256 * 1024


def main() -> None:
    policy, named = sys.argv[1], [text.partition("=")[::2] for text in sys.argv[2:]]
    config = RouterConfig(
        engines=[(name, url) for name, url in named if url.startswith("http")],
        listen_port=0,
        policy=policy,
        aliases={"nick": "good"},
        prefix=PrefixSettings(max_pieces=5000),
        kv=KvSettings(
            events={name: EventSource(url) for name, url in named if url.startswith("tcp")},
            index_bytes=1 << 20,
            tokens_seconds=1.0,
        ),
        limits=Limits(max_body_bytes=MAX_BODY_BYTES, max_buffered_bytes=64 * 2**20),
        timeouts=Timeouts(
            first_byte_seconds=6.0, idle_seconds=3.0, request_seconds=10.0, client_idle_seconds=5.0, drain_seconds=1.0
        ),
        health=HealthChecks(interval_seconds=0.3),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    uvloop.run(Router(config).serve(lambda host, port: print(port, flush=True)))


if __name__ == "__main__":
    main()
