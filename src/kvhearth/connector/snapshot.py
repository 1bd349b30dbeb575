"""What the engine holds right now, for a router that comes late: vLLM's KV events say what changes, not what is.

The answer is one batch of vLLM's own events (msgpack, as on its event socket): a ``BlockStored`` for every run of
blocks in HBM and every chunk in DRAM. A router subscribes first, asks then, and replays what it received meanwhile:
storing and removing a block twice does no harm.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_offload.base import make_offload_key

from kvhearth.connector.threads import start_thread
from kvhearth.errors import UserError
from kvhearth.store.protocol.address import Address

TOKEN_VARIABLE = "KVHEARTH_SNAPSHOT_TOKEN"  # noqa: S105 - a variable's name
_MOST_ANSWERS_AT_ONCE = 2
_MOST_CLIENTS = 16
_SOCKET_SECONDS = 10.0

_log = logging.getLogger(__name__)


class _Chain(NamedTuple):
    """The blocks of one request in one KV group."""

    kv_group: int
    hashes: Sequence[bytes]
    tokens: Sequence[int]
    lora_id: int | None
    lora_name: str | None
    extra_keys: Sequence[Any] | None


class Holdings:
    """Which tokens the engine's blocks and chunks stand for. `note` and `bind` belong to the scheduler's thread,
    `snapshot` may be called from any.

    Args:
        scheduler: the connector's scheduler side.
        data_parallel_rank: of this engine.
    """

    def __init__(self, scheduler: Any, *, data_parallel_rank: int) -> None:
        self._config = scheduler.config
        self._primary = scheduler.manager.primary_tier
        self._rank = data_parallel_rank
        self._pool: Any = None
        self._where: dict[bytes, tuple[_Chain, int]] = {}
        self._most = 4096

    def bind(self, pool: Any) -> None:
        """vLLM's block pool."""
        self._pool = pool
        rows = self._primary._num_chunks * self._config.blocks_per_chunk
        self._most = 2 * len(self._config.kv_group_configs) * (pool.num_gpu_blocks + rows) + 4096

    def note(self, request: Any) -> None:
        """A request has come, or has ended with more tokens than it came with."""
        tokens_per_hash = self._config.tokens_per_hash
        for group in self._config.kv_group_configs:
            hashes = list(resolve_block_hashes(request.block_hashes, tokens_per_hash, group.tokens_per_block))
            lora = request.lora_request
            chain = _Chain(
                group.group_idx,
                hashes,
                request.all_token_ids,
                lora.adapter_id if lora is not None else None,
                lora.name if lora is not None else None,
                _extra_keys(request, len(hashes), group.tokens_per_block),
            )
            for index, block_hash in enumerate(hashes):
                self._where[make_offload_key(block_hash, group.group_idx)] = (chain, index)
        if len(self._where) > self._most:
            self._prune()

    def snapshot(self) -> bytes:
        """The batch of events."""
        where = dict(self._where)
        in_hbm = dict.fromkeys(list(self._pool.cached_block_hash_to_block._cache)) if self._pool is not None else {}
        by_chain: dict[int, tuple[_Chain, list[int]]] = {}
        for key, (chain, index) in where.items():
            if key in in_hbm:
                by_chain.setdefault(id(chain), (chain, []))[1].append(index)
        events = [
            self._stored(chain, start, end, MEDIUM_GPU)
            for chain, indices in by_chain.values()
            for start, end in _runs(sorted(indices))
        ]
        size = self._config.blocks_per_chunk
        for key, (chain, index) in where.items():
            if (index + 1) % size == 0 and self._in_dram(key):
                events.append(self._stored(chain, index + 1 - size, index + 1, MEDIUM_CPU))
        return msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events, data_parallel_rank=self._rank))

    def _in_dram(self, key: bytes) -> bool:
        chunk = self._primary._policy.get(key)
        return chunk is not None and chunk.is_ready

    def _prune(self) -> None:
        in_hbm = self._pool.cached_block_hash_to_block._cache if self._pool is not None else {}
        self._where = {key: at for key, at in self._where.items() if key in in_hbm or self._in_dram(key)}

    def _stored(self, chain: _Chain, start: int, end: int, medium: str) -> BlockStored:
        group = next(g for g in self._config.kv_group_configs if g.group_idx == chain.kv_group)
        tokens = group.tokens_per_block
        extra = chain.extra_keys[start:end] if chain.extra_keys is not None else None
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(chain.hashes[i]) for i in range(start, end)],
            parent_block_hash=maybe_convert_block_hash(chain.hashes[start - 1]) if start else None,
            token_ids=list(chain.tokens[start * tokens : end * tokens]),
            block_size=tokens,
            lora_id=chain.lora_id,
            lora_name=chain.lora_name,
            medium=medium,
            extra_keys=to_event_extra_keys(extra),
            group_idx=chain.kv_group,
            kv_cache_spec_kind=group.kv_event_group_spec.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=group.kv_event_group_spec.kv_cache_spec_sliding_window,
        )


def _extra_keys(request: Any, blocks: int, tokens_per_block: int) -> list[Any] | None:
    if not (request.lora_request or request.cache_salt or request.mm_features or request.prompt_embeds is not None):
        return None
    keys, mm_index = [], 0
    for index in range(blocks):
        found, mm_index = generate_block_hash_extra_keys(
            request, index * tokens_per_block, (index + 1) * tokens_per_block, mm_index
        )
        keys.append(found)
    return keys


def _runs(indices: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges [start, end) of neighbours."""
    start = 0
    for at, index in enumerate(indices):
        if at + 1 == len(indices) or indices[at + 1] != index + 1:
            yield indices[start], index + 1
            start = at + 1


class SnapshotServer:
    """``GET /snapshot`` over HTTP, on a thread of its own.

    Prompts can be read from it, so beyond loopback it wants ``Authorization: Bearer`` with the token of the environment
    variable ``KVHEARTH_SNAPSHOT_TOKEN``.

    Args:
        listen: where; port 0: any.
        holdings: what to show.

    Raises:
        UserError: the address is taken, or reachable from elsewhere without a token.
    """

    def __init__(self, listen: Address, holdings: Holdings) -> None:
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not listen.is_loopback and not token:
            raise UserError(
                f"{listen} is reachable from other machines and there is no token",
                where="kv_connector_extra_config.snapshot_listen",
                remedy=f"set {TOKEN_VARIABLE}, or listen at 127.0.0.1",
            )
        try:
            self._server = _Server((listen.host, listen.port), _Handler)
        except OSError as error:
            raise UserError(
                f"cannot listen on {listen}: {error.strerror}",
                where="kv_connector_extra_config.snapshot_listen",
                remedy="choose another address",
            ) from None
        self._server.holdings = holdings
        self._server.token = token
        self._thread = start_thread(self._server.serve_forever, "snapshot")
        _log.info("snapshots of this engine at http://%s:%d/snapshot", *self._server.server_address[:2])

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    holdings: Holdings
    token: str = ""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        super().__init__(address, handler)
        self.answering = threading.BoundedSemaphore(_MOST_ANSWERS_AT_ONCE)

    def server_bind(self) -> None:
        # HTTPServer's own asks a name server what this machine is called, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._clients.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread to be had
            self._clients.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the snapshot left early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SOCKET_SECONDS
    server: _Server

    def do_GET(self) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.server.token and not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._send(401, b"want Authorization: Bearer with the token\n", "text/plain")
        elif self.path != "/snapshot":
            self._send(404, b"want /snapshot\n", "text/plain")
        elif not self.server.answering.acquire(blocking=False):
            self._send(503, b"busy; try again\n", "text/plain")
        else:
            self._answer()

    def _answer(self) -> None:
        try:
            body = self.server.holdings.snapshot()
        except Exception:
            _log.exception("cannot make a snapshot")
            self._send(500, b"cannot make a snapshot; see the engine's log\n", "text/plain")
        else:
            self._send(200, body, "application/msgpack")
        finally:
            self.server.answering.release()

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == 503:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)
