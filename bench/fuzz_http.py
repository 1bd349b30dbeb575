"""Broken, odd and sound traffic for the router, from clients and from engines at once, and for its public API:
``python bench/fuzz_http.py [--quick] [--seconds N] [--seed N] [--replay POLICY:NUMBER]``.

Two routers (policies prefix and kv-aware) stand before four engines: two answer right, two answer anything. What is
asked for: well-formed requests get the right bytes, and no others', whatever happens beside them; each whole request is
answered; the router itself never answers 500, and 502, 503 or 504 only where an engine gave cause (an answer of an
engine has the header ``x-kvhearth-engine``, one of the router's own has not); nothing is raised that is not handled;
memory, descriptors and tables come back to what they were. Cases follow from ``--seed``. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import uvloop
from support.fuzz_answers import right_body, wrong_answer
from support.fuzz_api import Api, feed_wire
from support.fuzz_client import DEADLINE_SECONDS, Case, judge, play
from support.fuzz_rig import Engine, Events, RouterProcess
from support.fuzzing import NONCE, Sent, cut_up, damaged, nonce_of, odd_request, page, request

SECONDS = 300.0
QUICK_SECONDS = 48.0
API_SHARE = 0.25
BATCH = 400
CONNECTIONS = 64
REST_SECONDS = 6.0
GROWTH_BYTES = 16 * 2**20
MOST_FAILURES = 20
MOST_TRIES = 150
SHOWN_BYTES = 1500


class Figures(NamedTuple):
    """Of a run."""

    cases: int
    failures: int
    rss_growth_mb: float
    status: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"--seconds {QUICK_SECONDS:g}")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", default="", help="play one case alone and print its bytes: as prefix:1234")
    given = parser.parse_args()
    seconds = QUICK_SECONDS if given.quick else given.seconds
    if given.replay:
        uvloop.run(replay(given.seed, given.replay))
        return
    figures = uvloop.run(fuzz(given.seed, seconds))
    print(json.dumps(figures._asdict()))
    if figures.failures:
        sys.exit(1)


async def fuzz(seed: int, seconds: float) -> Figures:
    """All of it; every failure is printed with what plays it again."""
    began = time.monotonic()
    calls = Calls(seed)
    while time.monotonic() < began + API_SHARE * seconds and calls.failures < MOST_FAILURES:
        calls.make(1000)
    await calls.read(max(20, int(seconds)))
    lab = Lab(seed, BATCH)
    try:
        await lab.start()
        await lab.run(began + seconds)
    finally:
        await lab.stop()
    growth_mb, status = round(lab.growth_bytes / 2**20, 1), dict(sorted(lab.status.items()))
    return Figures(calls.made + lab.cases, calls.failures + lab.failures, growth_mb, status)


class Calls:
    """Calls of the public API."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._api = Api()
        self.made = self.failures = 0

    def make(self, count: int) -> None:
        """So many more."""
        for number in range(self.made, self.made + count):
            try:
                self._api.one(number, random.Random(f"{self._seed}/api/{number}"))
            except Exception:
                self._failed(f"call {number}")
        self.made += count

    async def read(self, count: int) -> None:
        """So many streams of a store's events, from a socket."""
        try:
            await feed_wire(random.Random(self._seed), count)
        except Exception:
            self._failed("the store's feed")
        self.made += count

    def _failed(self, what: str) -> None:
        self.failures += 1
        print(f"seed {self._seed}, {what}:", file=sys.stderr)
        traceback.print_exc(limit=-4)


class Lab:
    """The engines, the routers before them, and the batches of cases that go through."""

    def __init__(self, seed: int, batch: int) -> None:
        self._seed = seed
        self._batch = batch
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._owners: dict[bytes, int] = {}
        self.engines = [Engine(name, good=name[0] == "g", seed=seed) for name in ("g0", "g1", "b0", "b1")]
        self.events: dict[str, Events] = {}
        self.routers: list[RouterProcess] = []
        self.status: Counter[str] = Counter()
        self.cases = self.failures = 0
        self.growth_bytes = 0

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()
        self.events = {engine.name: Events(self._seed + at) for at, engine in enumerate(self.engines)}
        for policy in ("prefix", "kv-aware"):
            self.routers.append(RouterProcess(policy, self.engines, self.events if policy == "kv-aware" else {}))
            await self.routers[-1].ready()

    async def stop(self) -> None:
        for router in self.routers:
            router.stop()
        for source in self.events.values():
            source.close()
        for engine in self.engines:
            await engine.stop()

    async def run(self, until: float) -> None:
        """Batches until then; memory and descriptors count from when a quarter of the time is over."""
        began = now = time.monotonic()
        longest = 0.0
        before: list[tuple[int, int]] = []
        while now + longest + REST_SECONDS < until and self.failures < MOST_FAILURES:
            await self.turn()
            longest = max(longest, time.monotonic() - now)
            if not before and time.monotonic() > began + (until - began) / 4:
                before = await self._sizes()
            now = time.monotonic()
        after = await self._sizes()
        for router, (resident, descriptors), now_has in zip(self.routers, before or after, after, strict=True):
            self.growth_bytes = max(self.growth_bytes, now_has[0] - resident)
            self._expect(self.growth_bytes < GROWTH_BYTES, router, f"grew by {self.growth_bytes} bytes")
            few = now_has[1] <= descriptors + 8
            self._expect(few, router, f"descriptors: {descriptors}, now {now_has[1]}")

    async def turn(self) -> None:
        """A batch for each router, and a look at what they have left in their tables."""
        await asyncio.gather(*[self._one_batch(router) for router in self.routers])
        for router in self.routers:
            left = await router.left_over()
            self._expect(not left, router, f"left in tables: {left}")

    async def _sizes(self) -> list[tuple[int, int]]:
        """Memory and descriptors of each router at rest: it closes idle connections to engines after 4 s."""
        await asyncio.sleep(4.5)
        return [(router.resident_bytes(), router.descriptors()) for router in self.routers]

    async def _one_batch(self, router: RouterProcess) -> None:
        cases = [make_case(self._seed, self.cases + at) for at in range(self._batch)]
        self.cases += len(cases)
        for case in cases:
            self._owners.update((nonce, case.number) for nonce in NONCE.findall(case.data))
        if router.policy == "kv-aware":
            for source in self.events.values():
                await source.publish(10)
        wrongs = await asyncio.gather(*[self._wrong(case, router, self.status) for case in cases])
        for case, wrong in zip(cases, wrongs, strict=True):
            if wrong:
                await self._report(router, case, wrong, lambda one: self._wrong(one, router, Counter()))
        await self._look_at(router, cases)
        for nonce in [nonce for nonce, number in self._owners.items() if number < self.cases - 20 * self._batch]:
            del self._owners[nonce]

    async def _wrong(self, case: Case, router: RouterProcess, status: Counter[str]) -> str:
        async with self._room:
            received = await play(case, router.port)
        return judge(case, received, self._owners, status)

    async def _look_at(self, router: RouterProcess, cases: list[Case]) -> None:
        """After a batch: is the router well, and has it sent engines nothing but requests?"""
        for engine in self.engines:
            for broken in engine.broken:
                self._expect(False, router, f"{broken} (cases {cases[0].number} to {cases[-1].number})")
            engine.broken.clear()
        trouble = router.trouble()
        if trouble:
            print(trouble, file=sys.stderr)

            async def logs_again(case: Case) -> str:
                with_log = await self._wrong(case, router, Counter())
                await asyncio.sleep(0.3)
                return router.trouble() or with_log

            guilty = [case for case in cases if router.alive and await logs_again(case)]
            self._expect(bool(guilty), router, f"its log has an error (cases {cases[0].number} to {cases[-1].number})")
            for case in guilty[:2]:
                await self._report(router, case, "the router's log has an error", logs_again)
        if not router.alive:
            self._expect(False, router, f"it died (cases {cases[0].number} to {cases[-1].number})")
            raise SystemExit(1)
        status, _ = await router.page("/health")
        self._expect(status == 200, router, f"/health answers {status}")

    async def _report(
        self, router: RouterProcess, case: Case, wrong: str, fails: Callable[[Case], Awaitable[str]]
    ) -> None:
        small = await _smallest(case, fails) if self.failures < 5 else case
        self.failures += 1
        alone = "" if small is not None else " (not when it is alone)"
        shown = (small or case).data
        print(f"seed {self._seed}, --replay {router.policy}:{case.number}: {wrong}{alone}", file=sys.stderr)
        print(f"  bytes: {shown[:SHOWN_BYTES]!r}{'…' if len(shown) > SHOWN_BYTES else ''}", file=sys.stderr)

    def _expect(self, true: bool, router: RouterProcess, what: str) -> None:
        if not true:
            self.failures += 1
            print(f"seed {self._seed}, {router.policy}: {what}", file=sys.stderr)


def make_case(seed: int, number: int) -> Case:
    """The ``number``-th case of a seed."""
    rng = random.Random(f"{seed}/case/{number}")
    nonces = [nonce_of(seed, number, at) for at in range(5)]
    kind = rng.random()
    bad = kind >= 0.4
    model = rng.choice(("bad", "bad", "bad", "good", "nick", "nobody")) if bad else "good"
    odd = kind > 0.8
    sent = [_whole(rng, nonce, model, odd=odd) for nonce in nonces[: rng.choice((1, 1, 1, 2, 4))]]
    expected = [_expected(seed, one, model, odd=odd) for one in sent]
    rest = b""
    if rng.random() < 0.35:
        rest = odd_request(rng, nonces[4], model)
        if rng.random() < 0.6:
            rest = damaged(rng, request(rng, nonces[4], model).data)
    data = b"".join(one.data for one in sent) + rest
    leaves = rng.randrange(len(data) + 1) if rng.random() < 0.1 else None
    patience = 0.2 if bad and rng.random() < 0.9 else DEADLINE_SECONDS
    pieces = cut_up(rng, data)
    pause = 0.02 if len(pieces) < 9 and rng.random() < 0.1 else 0.0
    return Case(number, sent, expected, rest, pieces, bad, leaves, patience, pause)


def _whole(rng: random.Random, nonce: str, model: str, *, odd: bool) -> Sent:
    return page(rng) if rng.random() < 0.1 else request(rng, nonce, model, odd=odd)


def _expected(seed: int, sent: Sent, model: str, *, odd: bool) -> tuple[int, bytes] | None:
    if model == "nobody" or b"<<%b>>" % sent.nonce.encode() not in sent.body:
        return None
    if model == "bad":
        return wrong_answer(seed, sent.nonce).expected
    return (200, right_body(sent.body)) if model == "good" and not odd else None


async def _smallest(case: Case, fails: Callable[[Case], Awaitable[str]]) -> Case | None:
    """The case with whatever can be left out of its bytes; None where it does not fail alone."""
    if not await fails(case):
        return None
    data, tries = case.data, 0
    step = len(data) // 2
    while step and tries < MOST_TRIES:
        at = 0
        while at < len(data) and tries < MOST_TRIES:
            tries += 1
            less = data[:at] + data[at + step :]
            if await fails(case._replace(sent=(), expected=(), rest=less, pieces=[less])):
                data = less
            else:
                at += step
        step //= 2
    return case._replace(sent=(), expected=(), rest=data, pieces=[data])


async def replay(seed: int, name: str) -> None:
    """One case alone, before routers of its own."""
    policy, _, number = name.partition(":")
    lab = Lab(seed, 1)
    await lab.start()
    try:
        case = make_case(seed, int(number))
        router = next(router for router in lab.routers if router.policy == policy)
        received = await play(case, router.port)
        print(f"sent {case.pieces!r}\nleaves after {case.leaves_after}\n{received}")
        print(judge(case, received, {}, Counter()) or "nothing is wrong")
        await asyncio.sleep(1)
        print(router.trouble())
    finally:
        await lab.stop()


if __name__ == "__main__":
    main()
