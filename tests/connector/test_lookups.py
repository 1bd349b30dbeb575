"""The scheduler asks what the store has, a step at a time, and never waits; silence becomes a miss at its deadline."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvhearth.connector import lookups as module
from kvhearth.connector.lookups import Lookups, Promise
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol.header import Header
from kvhearth.store.server.server import StoreServer

Hook = Callable[[bytes, list[bytes]], bytes | None]
Start = Callable[..., Lookups]


@pytest.fixture
def start() -> Iterator[Start]:
    """Lookups at an address."""
    made: list[tuple[Lookups, StoreClient]] = []

    def begin(address: str, timeout_seconds: float = 10.0) -> Lookups:
        client = StoreClient(address, timeout_seconds=timeout_seconds, max_connections=1)
        lookups = Lookups(client, timeout_seconds=timeout_seconds, progress=threading.Event())
        made.append((lookups, client))
        return lookups

    yield begin
    for lookups, client in made:
        lookups.close()
        client.close()


@pytest.fixture
def lookups(start: Start, store: StoreServer) -> Lookups:
    """Lookups in a running store."""
    return start(store.address)


def name(key: bytes) -> bytes:
    """A key in the store."""
    return b"ns:" + key


def put(client: StoreClient, *keys: bytes) -> None:
    """Another engine puts chunks."""
    for key in keys:
        assert client.put(name(key), Header(), b"x").stored


def step(lookups: Lookups, req_id: str, *keys: bytes, **more: Any) -> list[bool | None]:
    """One step of the scheduler."""
    answers = [lookups.ask(req_id, key, name(key), **more) for key in keys]
    lookups.flush()
    return answers


def answers(lookups: Lookups, req_id: str, *keys: bytes, seconds: float = 30.0, **more: Any) -> list[bool | None]:
    """Steps until all is known."""
    deadline = time.monotonic() + seconds
    while None in (found := step(lookups, req_id, *keys, **more)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def test_an_answer_comes_a_step_later_and_then_stays(lookups: Lookups, client: StoreClient) -> None:
    put(client, b"a", b"c")

    assert step(lookups, "r", b"a", b"b", b"c") == [None, None, None]
    assert answers(lookups, "r", b"a", b"b", b"c") == [True, False, True]
    client.delete(name(b"a"))
    assert step(lookups, "r", b"a", b"b", b"c") == [True, False, True]
    assert lookups.counts == {"hit": 2, "miss": 1, "timeout": 0, "full": 0}


def test_nothing_is_sent_before_the_step_ends(start: Start, scripted: Callable[..., Any]) -> None:
    store = scripted()
    lookups = start(store.address)
    lookups.ask("r", b"a", name(b"a"))
    time.sleep(0.05)
    assert store.seen == []
    lookups.flush()
    answers(lookups, "r", b"a")

    assert store.names() == [b"KV.EXISTS"]


def test_all_requests_of_a_step_are_asked_for_in_one_command(start: Start, scripted: Callable[..., Any]) -> None:
    store = scripted()
    lookups = start(store.address)
    for number in range(20):
        for key in (b"a", b"b"):
            lookups.ask(f"r{number}", b"%d%b" % (number, key), name(b"%d%b" % (number, key)))
    lookups.flush()
    answers(lookups, "r0", b"0a")

    assert [(command, len(keys)) for command, keys in store.seen] == [(b"KV.EXISTS", 40)]


def test_a_step_that_asks_nothing_sends_nothing(start: Start, scripted: Callable[..., Any]) -> None:
    store = scripted()
    lookups = start(store.address)
    for _ in range(5):
        lookups.flush()

    assert store.seen == []


def test_a_key_asked_again_before_its_answer_is_sent_once(
    start: Start, scripted: Callable[..., Any], gate: threading.Event, held: Hook
) -> None:
    store = scripted(held)
    lookups = start(store.address)
    for _ in range(5):
        assert step(lookups, "r", b"a") == [None]
    gate.set()
    answers(lookups, "r", b"a")

    assert len(store.seen) == 1


def test_a_store_that_does_not_answer_is_a_miss_at_the_deadline_and_counted(
    start: Start, scripted: Callable[..., Any], held: Hook
) -> None:
    store = scripted(held)
    lookups = start(store.address, 0.05)

    assert answers(lookups, "r", b"a", b"b") == [False, False]
    assert lookups.counts == {"hit": 0, "miss": 0, "timeout": 2, "full": 0}


def test_what_waited_behind_a_stalled_call_is_a_miss_too(
    start: Start, scripted: Callable[..., Any], held: Hook
) -> None:
    store = scripted(held)
    lookups = start(store.address, 0.1)
    for number in range(8):
        step(lookups, f"r{number}", b"a")
        time.sleep(0.02)

    assert [answers(lookups, f"r{number}", b"a") for number in range(8)] == [[False]] * 8
    assert lookups.counts["timeout"] == 8


def test_a_store_that_is_not_there_is_a_miss(start: Start) -> None:
    lookups = start("127.0.0.1:1")

    assert answers(lookups, "r", b"a") == [False]
    assert lookups.counts["timeout"] == 1


@pytest.mark.parametrize(
    "reply", [b"*1\r\n:1\r\n", b"+OK\r\n", b"$1\r\nd\r\n", b"$3\r\nddd\r\n", b"-ERR no\r\n", b"garbage\r\n"]
)
def test_a_store_that_answers_nonsense_is_a_miss(start: Start, scripted: Callable[..., Any], reply: bytes) -> None:
    lookups = start(scripted(lambda command, keys: reply).address, 0.5)

    assert False in answers(lookups, "r", b"a", b"b")
    assert lookups.counts["miss"] == 0
    assert lookups.counts["timeout"] >= 1


def test_after_an_outage_lookups_hit_again(start: Start, scripted: Callable[..., Any], gate: threading.Event) -> None:
    store = scripted(lambda command, keys: None if gate.is_set() else b"-LOADING not yet\r\n")
    store.values[name(b"a")] = b"x"
    lookups = start(store.address)
    assert answers(lookups, "before", b"a") == [False]
    gate.set()
    deadline = time.monotonic() + 30
    for number in range(10_000):
        if answers(lookups, f"after-{number}", b"a") == [True]:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_more_than_the_queue_holds_is_full_and_the_rest_is_answered(
    start: Start, scripted: Callable[..., Any], gate: threading.Event, held: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_QUEUED_KEYS", 10)
    store = scripted(held)
    store.values[name(b"a")] = b"x"
    lookups = start(store.address)
    step(lookups, "first", b"a")
    deadline = time.monotonic() + 30
    while not store.seen:  # the thread is busy with it from here on
        assert time.monotonic() < deadline
        time.sleep(0.002)
    step(lookups, "second", *[b"%d" % number for number in range(8)])
    step(lookups, "third", b"x", b"y", b"z")

    assert step(lookups, "third", b"x", b"y", b"z") == [False] * 3
    assert lookups.counts["full"] == 3
    gate.set()
    assert answers(lookups, "first", b"a") == [True]
    assert answers(lookups, "second", b"0", b"7") == [False, False]
    assert answers(lookups, "fourth", b"a") == [True]  # there is room again


def test_what_was_promised_and_did_not_come_is_not_hoped_for_again(lookups: Lookups, client: StoreClient) -> None:
    put(client, b"a", b"b")
    assert answers(lookups, "r", b"a", b"b") == [True, True]
    lookups.set_missing("r", [b"b"])
    lookups.set_missing("somebody else", [b"a"])

    assert step(lookups, "r", b"a", b"b") == [True, False]


def test_set_missing_outlives_an_answer_that_is_under_way(
    start: Start, scripted: Callable[..., Any], gate: threading.Event, held: Hook
) -> None:
    store = scripted(held)
    store.values[name(b"a")] = b"x"
    lookups = start(store.address)
    step(lookups, "r", b"a")
    lookups.set_missing("r", [b"a"])
    gate.set()
    answers(lookups, "other", b"a")

    assert step(lookups, "r", b"a") == [False]


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_no_answer_of_an_earlier_request_reaches_a_later_one_of_its_name(
    start: Start, scripted: Callable[..., Any], gate: threading.Event, how: str
) -> None:
    """The first is answered "there"; by the time its successor asks, the chunk is gone."""
    replies = iter([b"$1\r\nd\r\n", b"$1\r\n-\r\n"])
    store = scripted(lambda command, keys: next(replies) if gate.wait(60) else None)
    lookups = start(store.address)
    step(lookups, "r", b"a")
    lookups.forget("r") if how == "forget" else lookups.clear()
    assert lookups.open_requests == 0
    step(lookups, "r", b"a")
    gate.set()

    assert answers(lookups, "r", b"a") == [False]


@pytest.mark.parametrize("how", ["forget", "clear"])
def test_what_was_asked_in_this_step_by_a_request_that_is_gone_is_not_sent(
    start: Start, scripted: Callable[..., Any], how: str
) -> None:
    store = scripted()
    lookups = start(store.address)
    lookups.ask("r", b"a", name(b"a"))
    lookups.forget("r") if how == "forget" else lookups.clear()
    lookups.forget("r")
    lookups.flush()
    answers(lookups, "other", b"b")

    assert [keys for _, keys in store.seen] == [[name(b"b")]]


def test_a_request_that_starts_over_asks_afresh(lookups: Lookups, client: StoreClient) -> None:
    assert answers(lookups, "r", b"a") == [False]
    put(client, b"a")
    lookups.forget("r")

    assert answers(lookups, "r", b"a") == [True]


def test_requests_that_are_gone_leave_nothing_behind(lookups: Lookups) -> None:
    for number in range(200):
        step(lookups, f"r{number}", b"a", b"b")
        lookups.forget(f"r{number}")
    answers(lookups, "last", b"a")
    lookups.forget("last")

    assert lookups.open_requests == 0
    assert not lookups._answered
    assert not lookups._queue


def test_answers_are_those_of_the_store_for_any_order_of_asking_forgetting_and_coming(
    lookups: Lookups, client: StoreClient
) -> None:
    """Against a model: an answer is what the store had at some moment since the request (of this life) asked."""
    rng = random.Random(7)
    keys = [b"%d" % number for number in range(12)]
    has = dict.fromkeys(keys, False)
    asked: dict[tuple[str, bytes], set[bool]] = {}
    for _ in range(1500):
        match rng.randrange(8):
            case 0:
                key = rng.choice(keys)
                has[key] = not has[key]
                put(client, key) if has[key] else client.delete(name(key))
                for (_, other), seen in asked.items():
                    if other == key:
                        seen.add(has[key])
            case 1:
                req_id = f"r{rng.randrange(4)}"
                lookups.forget(req_id)
                asked = {at: seen for at, seen in asked.items() if at[0] != req_id}
            case _:
                req_id = f"r{rng.randrange(4)}"
                for key in rng.sample(keys, 3):
                    seen = asked.setdefault((req_id, key), {has[key]})
                    found = lookups.ask(req_id, key, name(key))
                    assert found is None or found in seen
                lookups.flush()


# ---- promises


def test_a_promise_is_awaited_and_kept(lookups: Lookups, client: StoreClient) -> None:
    promise = Promise(32, time.monotonic() + 60)

    def ask() -> list[bool | None]:
        found = [
            lookups.ask("r", key, name(key), end_token=16 * at, promise=promise)
            for at, key in enumerate((b"a", b"b", b"c"), start=1)
        ]
        lookups.flush()
        return found

    assert ask() == [None, None, None]
    for _ in range(20):
        time.sleep(0.005)
        assert ask() == [None, None, None]
    put(client, b"a")
    time.sleep(0.1)
    assert ask() == [None, None, None]  # half of a promise
    put(client, b"b")
    deadline = time.monotonic() + 30
    while (found := ask()) != [True, True, False]:
        assert time.monotonic() < deadline
        assert found == [None, None, None]
        time.sleep(0.005)

    assert lookups.awaited == {"kept": 1, "late": 0}


def test_a_promise_that_is_not_kept_ends_at_its_time(lookups: Lookups, client: StoreClient) -> None:
    put(client, b"a")
    until = time.monotonic() + 0.3
    found = answers(lookups, "r", b"a", b"b", end_token=16, promise=Promise(16, until))

    assert time.monotonic() >= until
    assert found == [True, False]
    assert lookups.awaited == {"kept": 0, "late": 1}


def test_a_promise_kept_before_it_is_asked_for_costs_no_wait(lookups: Lookups, client: StoreClient) -> None:
    put(client, b"a")

    assert answers(lookups, "r", b"a", end_token=16, promise=Promise(16, time.monotonic() + 600)) == [True]


def test_what_nobody_promised_is_not_awaited(lookups: Lookups) -> None:
    """A chunk that ends past the promise, and a request without one."""
    assert answers(lookups, "r", b"a", end_token=32, promise=Promise(16, time.monotonic() + 600)) == [False]
    assert answers(lookups, "s", b"a") == [False]
    assert lookups.awaited == {"kept": 0, "late": 0}


def test_of_keys_asked_from_the_end_only_the_promised_are_awaited(lookups: Lookups, client: StoreClient) -> None:
    """vLLM looks a sliding window up from its end, so what lies past the promise is asked first."""
    put(client, b"1", b"2")
    promise = Promise(32, time.monotonic() + 1)

    def ask() -> list[bool | None]:
        found = [
            lookups.ask("r", b"%d" % at, name(b"%d" % at), end_token=16 * at, promise=promise) for at in (4, 3, 2, 1)
        ]
        lookups.flush()
        return found

    deadline = time.monotonic() + 30
    while None in (found := ask()):
        assert time.monotonic() < deadline
        time.sleep(0.005)

    assert found == [False, False, True, True]
    assert lookups.awaited == {"kept": 1, "late": 0}


def test_others_are_answered_while_a_promise_is_open(lookups: Lookups, client: StoreClient) -> None:
    put(client, b"b")
    step(lookups, "r", b"a", end_token=16, promise=Promise(16, time.monotonic() + 60))
    for number in range(10):
        assert answers(lookups, f"s{number}", b"b") == [True]

    assert step(lookups, "r", b"a") == [None]


def test_a_promise_of_a_request_that_is_gone_touches_nobody(lookups: Lookups, client: StoreClient) -> None:
    step(lookups, "r", b"a", end_token=16, promise=Promise(16, time.monotonic() + 0.3))
    lookups.forget("r")
    put(client, b"b")
    assert answers(lookups, "r", b"b", b"a") == [True, False]
    time.sleep(0.4)

    assert step(lookups, "r", b"b", b"a") == [True, False]


def test_a_promise_during_an_outage_ends_at_its_time(start: Start, scripted: Callable[..., Any], held: Hook) -> None:
    store = scripted(held)
    lookups = start(store.address, 0.05)

    assert answers(lookups, "r", b"a", end_token=16, promise=Promise(16, time.monotonic() + 0.3)) == [False]
    assert lookups.awaited["late"] == 1


# ---- the end


def test_close_ends_the_thread_though_the_store_is_silent_and_a_promise_is_open(
    start: Start, scripted: Callable[..., Any], held: Hook
) -> None:
    store = scripted(held)
    lookups = start(store.address, 0.2)
    step(lookups, "r", b"a", end_token=16, promise=Promise(16, time.monotonic() + 600))
    closer = threading.Thread(target=lookups.close)
    closer.start()
    closer.join(30)

    assert not closer.is_alive()
    assert not lookups._thread.is_alive()


def test_close_of_idle_lookups_returns_and_may_be_called_twice(lookups: Lookups) -> None:
    lookups.close()
    lookups.close()

    assert not lookups._thread.is_alive()


def test_progress_is_told_when_an_answer_has_come(store: StoreServer) -> None:
    client, progress = StoreClient(store.address, timeout_seconds=10), threading.Event()
    lookups = Lookups(client, timeout_seconds=10, progress=progress)
    try:
        assert not progress.is_set()
        step(lookups, "r", b"a")
        assert progress.wait(30)
        assert step(lookups, "r", b"a") == [False]
    finally:
        lookups.close()
        client.close()


def test_promises_of_requests_that_are_gone_are_not_asked_for_any_more(lookups: Lookups, client: StoreClient) -> None:
    for number in range(20):
        promise = Promise(16, time.monotonic() + 600)
        assert lookups.ask(f"r{number}", b"never", name(b"never"), end_token=16, promise=promise) is None
    lookups.flush()
    time.sleep(0.2)
    for number in range(20):
        lookups.forget(f"r{number}")
    time.sleep(0.2)
    before = sum(client.counts.values())
    time.sleep(0.3)

    assert sum(client.counts.values()) == before
    assert answers(lookups, "other", b"absent") == [False]
