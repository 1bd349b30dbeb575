"""All that policy kv-aware stands on: the KV index and the feeds that fill it, token ids, and the predictor. It decides
nothing itself, and no other policy needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from kvhearth.cost.costmodel import CostModel
from kvhearth.cost.layout import Parallelism
from kvhearth.metrics import MetricFamily, Registry
from kvhearth.metrics import router as names
from kvhearth.metrics import router_tokens as token_names
from kvhearth.router.ask import ask_engine
from kvhearth.router.feeds import EngineEvents, Feeds
from kvhearth.router.tokens import TokenIds, Tokens
from kvhearth.routing.chain import block_keys, chain_seed
from kvhearth.routing.index import KvIndex, Medium, StoredBlocks
from kvhearth.routing.policies.kv_aware import KvAware, KvAwareSettings
from kvhearth.routing.ttft import ModelledCost, Predictor
from kvhearth.store.open import members_of

if TYPE_CHECKING:
    from kvhearth.router.config import KvSettings, RouterConfig
    from kvhearth.router.engines import Engine
    from kvhearth.router.exchange import Exchange
    from kvhearth.router.fleet import Fleet
    from kvhearth.router.tokens.local import LocalTokenizer

log = logging.getLogger(__name__)

REGISTER_SECONDS = 1.0
"""How often engines that have come are looked for, to compare tokenizers with them."""


class BlockSizes(KvIndex):
    """The KV index, which also notes how many tokens a block has on each target, for keys must be cut as blocks are."""

    def __init__(self, *, max_bytes: int, now: Callable[[], float]) -> None:
        super().__init__(max_bytes=max_bytes, now=now)
        self.block_tokens: dict[str, int] = {}

    def stored(self, target: str, medium: Medium, stored: StoredBlocks) -> None:
        """See `KvIndex.stored`."""
        size = stored.block_tokens
        if medium is Medium.HBM and self.block_tokens.get(target) != size and _is_size(stored):
            self.block_tokens[target] = size
        super().stored(target, medium, stored)


class KvRouting:
    """Owned by the router; lives as long as it does.

    Args:
        config: of the router; its ``kv`` is what is meant here.
        registry: takes the index's metrics, and those of feeds and tokens.
    """

    def __init__(self, config: RouterConfig, registry: Registry) -> None:
        settings = config.kv
        self._settings = settings
        self._limits = config.limits
        key = config.key_for_engines
        self._headers = b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode()
        self.index = BlockSizes(max_bytes=settings.index_bytes, now=time.monotonic)
        self.policy = KvAware(self.index, Predictor(_cost(settings)), Random(), KvAwareSettings(prefix=config.prefix))
        self.tokens = Tokens(_local(settings.tokenizer))
        self.feeds = Feeds(self.index, snapshot_token=settings.snapshot_token)
        self._block_tokens = 0
        self._fleet: Fleet | None = None
        self._registering: asyncio.Task[None] | None = None
        registry.collect_from(self._read)
        registry.collect_from(self.feeds.metrics)

    # Life

    async def start(self, fleet: Fleet) -> None:
        """Follow every engine that publishes events, and the store; compare tokenizers with engines as they come."""
        self._fleet = fleet
        settings = self._settings
        for engine in fleet.engines:
            self.engine_came(engine)
        if settings.store:
            self.feeds.follow_store(members_of(settings.store, where="store").nodes, password=settings.store_password)
        self._registering = asyncio.get_running_loop().create_task(self._register())

    async def stop(self) -> None:
        """Follow nobody any more."""
        if self._registering is not None:
            self._registering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._registering
        await self.feeds.stop()
        self.tokens.close()

    def engine_came(self, engine: Engine) -> None:
        """Follow it, if it publishes events."""
        source = engine.member.events
        if source is not None:
            at = EngineEvents(source.events, source.replay, source.snapshot)
            self.feeds.add([target.name for target in engine.targets], at)

    def engine_left(self, engine: Engine) -> Coroutine[None, None, None]:
        """Follow it no more, and believe nothing of it. Awaiting this ends its feeds."""
        self.tokens.forget(engine.name)
        ending = [self.feeds.remove(target.name) for target in engine.targets]

        async def ended() -> None:
            for one in ending:
                await one

        return ended()

    def target_gone(self, target: str) -> None:
        """An engine became unreachable, and with it what it held."""
        self.feeds.restarted(target)
        self.tokens.forget(target.partition("#")[0])

    async def _register(self) -> None:
        while True:
            await asyncio.sleep(REGISTER_SECONDS)
            for engine in self._fleet.engines if self._fleet is not None else ():
                if not (engine.healthy and engine.models) or engine.name in self.tokens.parity:
                    continue
                try:
                    await self.tokens.register(engine.name, min(engine.models), self._asker(engine))
                except (OSError, TimeoutError) as error:
                    log.debug("%s cannot be asked for token ids: %s", engine.name, error)
                except Exception:
                    log.exception("the tokenizer cannot be compared with that of %s", engine.name)

    # For decisions

    def tokens_of(self, path: bytes, fields: dict[str, Any], model: str) -> TokenIds | asyncio.Future[TokenIds]:
        """Ids of a request's prompt, at once or in a while; `within_deadline` bounds that."""
        serving = (self._fleet.serving(model) if self._fleet is not None else None) or ()
        engines = {target.engine for target in serving}
        if not engines:
            return TokenIds((), "unreachable")
        engine = min(engines, key=lambda engine: engine.requests_in_flight)
        names = {engine.name for engine in engines}
        return self.tokens.of(path.decode("latin-1"), fields, model, self._asker(engine), names)

    async def within_deadline(self, found: asyncio.Future[TokenIds]) -> TokenIds:
        """The ids, or why there are none in time."""
        try:
            async with asyncio.timeout(self._settings.tokens_seconds):
                return await found
        except TimeoutError:
            return TokenIds((), "late")

    def dispatched(self, target: str) -> None:
        """A request was sent there."""
        self.feeds.asked(target)

    def _asker(self, engine: Engine) -> Callable[[str, dict[str, Any]], Any]:
        def ask(path: str, question: dict[str, Any]) -> Any:
            return ask_engine(
                engine, self._limits, path, question, headers=self._headers, seconds=self._settings.tokens_seconds
            )

        return ask

    def keys(self, lora: str, salt: str, found: TokenIds) -> tuple[Sequence[int], int, str]:
        """Block keys of a prompt, the tokens of a block, and why there are no keys ("": there are)."""
        block_tokens = self._settings.block_tokens or self._block_tokens
        if not block_tokens:
            return (), 0, found.reason or "no_events"
        if not found.ids:
            return (), 0, found.reason or "no_tokens"
        try:
            return block_keys(found.ids, block_tokens, chain_seed(lora, salt)), block_tokens, ""
        except ValueError:
            return (), 0, "bad_tokens"

    def sweep(self, fleet: Fleet, exchanges: Iterable[Exchange], now: float) -> None:
        """What needs no request to happen: corrections that fade, and prompts that must be computed by now."""
        for target in fleet.targets.values():
            factor = self.policy.predictor.factor(target.name)
            if factor != target.ttft_factor:
                target.corrected(factor)
        for exchange in exchanges:
            if exchange.prefill_ends < now:
                exchange.prefilled()
        self.feeds.check()
        sizes = self.index.block_tokens.values()
        self._block_tokens = max(set(sizes), key=list(sizes).count) if sizes else 0

    def _read(self) -> Iterable[MetricFamily]:
        index = self.index
        blocks = [
            ((target, tier), float(count))
            for target in (self._fleet.targets if self._fleet is not None else ())
            for tier, count in zip(("hbm", "dram"), index.blocks_of(target), strict=True)
        ]
        yield MetricFamily(names.INDEX_BLOCKS, blocks)
        yield MetricFamily(names.INDEX_HOLDERS, [((), index.size)])
        yield MetricFamily(names.INDEX_KEYS, [((), index.keys)])
        yield MetricFamily(names.INDEX_GUESSES, [((), index.guesses)])
        yield MetricFamily(names.INDEX_PARKED, [((), index.parked)])
        yield MetricFamily(names.INDEX_BYTES, [((), index.nbytes)])
        yield MetricFamily(names.INDEX_IGNORED, [((why,), float(n)) for why, n in index.ignored.items()])
        counts = [((how,), float(count)) for how, count in self.tokens.counts.items()]
        yield MetricFamily(token_names.TOKENIZED, counts)
        parity = [
            ((engine, shape), float(shape in found.agreed))
            for engine, found in self.tokens.parity.items()
            for shape in (*found.agreed, *found.differing)
        ]
        yield MetricFamily(token_names.PARITY, parity)


def _is_size(stored: StoredBlocks) -> bool:
    """Whether the event means what it says of a block's size."""
    return stored.block_tokens > 0 and 0 < len(stored.token_ids) == len(stored.hashes) * stored.block_tokens


def _local(folder: str) -> LocalTokenizer | None:
    if not folder:
        return None
    from kvhearth.router.tokens.local import LocalTokenizer  # brings tokenizers and jinja2

    return LocalTokenizer(Path(folder))


def _cost(settings: KvSettings) -> ModelledCost | None:
    if not settings.gpu:
        return None
    parallelism = Parallelism(tp=settings.tensor_parallel)
    return ModelledCost(CostModel(settings.model, settings.gpu, parallelism))
