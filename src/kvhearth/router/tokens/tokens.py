"""Token ids for routing: those given, those of our own tokenizer where it agrees with the engines, else the engine's.

Little is encoded at once; more on a few threads, for the event loop must not stand still.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvhearth.router.tokens.ids import AskEngine, TokenIds
from kvhearth.router.tokens.shapes import Chat, MultiModal, Text, asked_of

if TYPE_CHECKING:
    from kvhearth.router.tokens.local import LocalTokenizer
    from kvhearth.router.tokens.parity import Parity

log = logging.getLogger(__name__)

AT_ONCE_BYTES = 4096
"""Text still to be encoded, up to here, is encoded on the event loop: about a millisecond."""

_THREADS = 2
_MOST_WAITING = 256


class Tokens:
    """Ids of requests for the engines of one router.

    Args:
        local: the model's tokenizer; None leaves everything to the engines' own ``/tokenize``.
    """

    def __init__(self, local: LocalTokenizer | None) -> None:
        self._local = local
        self._pool = ThreadPoolExecutor(_THREADS, "kvhearth-tokens") if local is not None else None
        self._parity: dict[str, Parity] = {}
        self._waiting = 0
        self.counts = {"given": 0, "local": 0, "engine": 0, "none": 0}

    def of(
        self, path: str, fields: dict[str, Any], model: str, ask: AskEngine, engines: Iterable[str]
    ) -> TokenIds | asyncio.Future[TokenIds]:
        """The ids that a request's prompt becomes: at once, or when they are made.

        Args:
            path: of the request, without a query.
            fields: its decoded body.
            model: as engines name it.
            ask: an engine that serves it.
            engines: the names of all that do; our ids are taken where every one of them makes the same.
        """
        asked = asked_of(path, fields)
        if isinstance(asked, list):
            self.counts["given"] += 1
            return TokenIds(asked)
        if asked is None or isinstance(asked, MultiModal):
            self.counts["none"] += 1
            return TokenIds((), "shape" if asked is None else "multi_modal")
        if self._waiting >= _MOST_WAITING:
            self.counts["none"] += 1
            return TokenIds((), "late")
        if self._local is not None and self._agree(engines, asked.shapes):
            return self._here(self._local, asked)
        return self._later(self._asked(asked, model, ask))

    async def register(self, engine: str, model: str, ask: AskEngine) -> Parity | None:
        """Compare our tokenizer with an engine that has come; None without a tokenizer.

        Raises what ``ask`` raises; shapes are not trusted before an engine has agreed.
        """
        if self._local is None:
            return None
        from kvhearth.router.tokens.parity import probe  # brings tokenizers and jinja2

        parity = self._parity[engine] = await probe(self._local, model, ask)
        for shape, why in parity.differing.items():
            log.info("%s makes other ids of %s: %s; it is asked for them", engine, shape, why)
        return parity

    def forget(self, engine: str) -> None:
        """The engine is gone, or another one now."""
        self._parity.pop(engine, None)

    @property
    def parity(self) -> dict[str, Parity]:
        """By engine."""
        return self._parity

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _agree(self, engines: Iterable[str], shapes: frozenset[str]) -> bool:
        parities = [self._parity.get(engine) for engine in engines]
        return bool(parities) and all(parity is not None and shapes <= parity.agreed for parity in parities)

    def _here(self, local: LocalTokenizer, asked: Text | Chat) -> TokenIds | asyncio.Future[TokenIds]:
        self.counts["local"] += 1
        size = _size(asked)
        if isinstance(asked, Text) and size > AT_ONCE_BYTES:
            return self._on_thread(local, asked)
        if size > 64 * AT_ONCE_BYTES:  # rendering alone takes long
            return self._on_thread(local, asked)
        try:
            text = local.text_of(asked)
        except ValueError:
            return TokenIds((), "refused")
        if len(text) > AT_ONCE_BYTES and local.uncached_bytes(text) > AT_ONCE_BYTES:
            return self._on_thread(local, asked)
        return TokenIds(local.encode(text, special=asked.special))

    def _on_thread(self, local: LocalTokenizer, asked: Text | Chat) -> asyncio.Future[TokenIds]:
        def work() -> TokenIds:
            try:
                return TokenIds(local.encode(local.text_of(asked), special=asked.special))
            except ValueError:
                return TokenIds((), "refused")

        return self._later(asyncio.wrap_future(self._pool.submit(work)) if self._pool is not None else None)

    async def _asked(self, asked: Text | Chat, model: str, ask: AskEngine) -> TokenIds:
        self.counts["engine"] += 1
        try:
            status, answer = await ask("/tokenize", {"model": model, **asked.question()})
        except TimeoutError:
            return TokenIds((), "late")
        except OSError:
            return TokenIds((), "unreachable")
        except RecursionError:  # nested as deeply as can be read, and no deeper to be written
            return TokenIds((), "shape")
        ids = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
        if not isinstance(ids, list):
            return TokenIds((), "tokenizer_missing" if status in (404, 405, 501) else "refused")
        return TokenIds(ids)

    def _later(self, work: Any) -> asyncio.Future[TokenIds]:
        self._waiting += 1
        future: asyncio.Future[TokenIds] = asyncio.ensure_future(work)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: asyncio.Future[TokenIds]) -> None:
        self._waiting -= 1


def _size(asked: Text | Chat) -> int:
    if isinstance(asked, Text):
        return len(asked.text)
    return sum(len(str(message.get("content") or "")) for message in asked.messages)
