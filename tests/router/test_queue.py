"""While every engine of a model is full its requests wait in the router, in order, bounded, and not for ever."""

from __future__ import annotations

from kvhearth.router.config import Limits, Queueing, Timeouts

ONE_AT_A_TIME = Limits(max_requests_per_engine=1)


def busy(lab, engines: int = 1, **options):
    """A router whose engines take one request at a time and answer when let go; each has one."""
    scripted = [lab.engine() for _ in range(engines)]
    for engine in scripted:
        engine.behave = lab.gated(lab.reply())
    options.setdefault("limits", ONE_AT_A_TIME)
    router = lab.router(*scripted, **options)
    wires = [router.wire() for _ in scripted]
    for wire in wires:
        wire.prompt("first")
    lab.until(lambda: all(engine.serving == 1 for engine in scripted))
    return router, scripted, wires


def waiting(router) -> float:
    return router.metric("kvhearth_router_queued_requests")


def queue(lab, router, prompt: str):
    before = waiting(router)
    wire = router.wire()
    wire.prompt(prompt)
    lab.until(lambda: waiting(router) == before + 1)
    return wire


def prompts(engine) -> list[str]:
    return [received.body.split(b'"')[7].decode() for received in engine.requests]


def test_a_request_waits_for_room_and_is_answered_when_there_is(lab):
    router, [engine], [first] = busy(lab)
    second = queue(lab, router, "second")
    assert engine.serving == 1
    engine.let_go(2)
    assert [wire.response()[0] for wire in (first, second)] == [200, 200]
    assert router.metric("kvhearth_router_queue_outcomes_total", outcome="sent") == 1
    assert router.metric("kvhearth_router_queue_seconds_count", model="m") == 1
    assert waiting(router) == 0


def test_those_who_wait_are_served_in_the_order_in_which_they_came(lab):
    router, [engine], wires = busy(lab)
    wires += [queue(lab, router, f"w{number}") for number in range(4)]
    for wire in wires:
        engine.let_go()
        assert wire.response()[0] == 200
    assert prompts(engine) == ["first", "w0", "w1", "w2", "w3"]


def test_a_new_request_does_not_overtake_those_who_wait(lab):
    router, engines, wires = busy(lab, 2)
    wires += [queue(lab, router, f"w{number}") for number in range(3)]
    for engine in engines:
        engine.let_go(5)
    assert [wire.response()[0] for wire in wires] == [200] * 5


def test_who_waits_too_long_is_told_when_to_come_back(lab):
    router, [engine], [first] = busy(lab, queue=Queueing(wait_seconds=0.2))
    second = router.wire()
    second.prompt()
    status, error = second.error()
    assert (status, error["code"]) == (503, "overloaded")
    assert int(error["headers"]["retry-after"]) >= 1
    assert router.metric("kvhearth_router_queue_outcomes_total", outcome="expired") == 1
    engine.let_go()
    assert first.response()[0] == 200
    assert len(engine.requests) == 1


def test_no_more_wait_than_there_is_room_for(lab):
    router, _, _ = busy(lab, queue=Queueing(max_waiting_requests=2))
    for number in range(2):
        queue(lab, router, f"w{number}")
    third = router.wire()
    third.prompt()
    status, error = third.error()
    assert (status, error["code"]) == (503, "overloaded")
    assert router.metric("kvhearth_router_queue_outcomes_total", outcome="full") == 1


def test_a_client_that_leaves_while_it_waits_costs_no_engine_anything(lab):
    router, [engine], [first] = busy(lab)
    gone = queue(lab, router, "gone")
    stays = queue(lab, router, "stays")
    gone.close()
    lab.until(lambda: waiting(router) == 1)
    assert router.metric("kvhearth_router_queue_outcomes_total", outcome="left") == 1
    engine.let_go(2)
    assert [wire.response()[0] for wire in (first, stays)] == [200, 200]
    assert prompts(engine) == ["first", "stays"]


def test_an_engine_that_comes_up_takes_those_who_wait(lab):
    late = lab.engine()
    late.die()
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, late, limits=ONE_AT_A_TIME)
    first = router.wire()
    first.prompt("first")
    lab.until(lambda: engine.serving == 1)
    second = queue(lab, router, "second")
    late.start()
    assert second.response()[0] == 200
    assert prompts(late) == ["second"]
    engine.let_go()
    assert first.response()[0] == 200


def test_when_the_last_engine_goes_down_those_who_wait_are_told_at_their_deadline(lab):
    router, [engine], [first] = busy(lab, queue=Queueing(wait_seconds=0.3))
    second = queue(lab, router, "second")
    engine.die()
    assert first.error()[0] == 502
    assert second.error()[0] == 503
    assert waiting(router) == 0


def test_an_engine_that_reports_a_queue_of_its_own_gets_no_more_until_it_has_room(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine, queue=Queueing(engine_backlog=2))
    wires = [router.wire() for _ in range(6)]
    for number, wire in enumerate(wires):
        wire.prompt(f"w{number}")
    lab.until(lambda: engine.serving == 6)
    engine.page = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 4\n"
    lab.until(lambda: router.metric("kvhearth_router_engine_capacity") == 4)
    late = queue(lab, router, "late")
    engine.let_go(2)
    lab.until(lambda: engine.serving == 4)
    assert waiting(router) == 1
    engine.page = b"vllm:num_requests_running 2\nvllm:num_requests_waiting 0\n"
    lab.until(lambda: waiting(router) == 0)
    engine.let_go(5)
    assert [wire.response()[0] for wire in (*wires, late)] == [200] * 7


def test_a_router_that_stops_lets_nobody_wait_for_ever(lab):
    router, _, _ = busy(lab, timeouts=Timeouts(drain_seconds=0.2, sweep_seconds=0.02))
    wire = queue(lab, router, "late")
    router.stop()
    lab.routers.remove(router)
    assert wire.rest() == b""
