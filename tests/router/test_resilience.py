"""Retries, breakers and drain as a client meets them: nothing is sent twice after an answer began, nothing is lost."""

from __future__ import annotations

import time

from kvhearth.router.config import HealthChecks, Resilience

SLOW_CHECKS = HealthChecks(interval_seconds=60)
"""So that nothing but requests finds out how an engine is."""


def ask(router) -> int:
    wire = router.wire()
    wire.prompt()
    status = wire.response()[0]
    wire.close()
    return status


def test_an_engine_that_says_it_did_nothing_is_replaced_by_another(lab):
    poor, good = lab.engine(), lab.engine()
    poor.behave = lab.reply(503, b'{"error":"sleeping"}')
    router = lab.router(poor, good)
    assert [ask(router) for _ in range(2)] == [200, 200]
    assert (len(poor.requests), len(good.requests)) == (1, 2)
    assert router.metric("kvhearth_router_upstream_failures_total", engine="e0", reason="status_503") == 1
    assert router.metric("kvhearth_router_retries_total", kind="other_engine") == 1


def test_where_there_is_no_other_its_own_answer_is_passed_on(lab):
    engine = lab.engine()
    engine.behave = lab.reply(503, b'{"error":"sleeping"}')
    wire = lab.router(engine).wire()
    wire.prompt()
    assert wire.response()[::2] == (503, b'{"error":"sleeping"}')


def test_an_error_of_the_request_itself_is_not_tried_again(lab):
    poor, good = lab.engine(), lab.engine()
    poor.behave = lab.reply(500, b"{}")
    router = lab.router(poor, good)
    assert ask(router) == 500
    assert good.requests == []


def test_a_request_is_tried_on_so_many_engines_and_no_more(lab):
    engines = [lab.engine() for _ in range(4)]
    for engine in engines:
        engine.behave = lab.hang_up()
    router = lab.router(*engines, resilience=Resilience(max_attempts=3))
    assert ask(router) == 502
    assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1, 1]


def test_retries_do_not_outgrow_their_budget(lab):
    poor, good = lab.engine(), lab.engine()
    poor.behave = lab.reply(503, b"{}")
    resilience = Resilience(retry_share=0.1, retry_burst=2, failures_to_open=1000, error_share=1.0)
    router = lab.router(poor, good, health=SLOW_CHECKS, resilience=resilience)
    statuses = [ask(router) for _ in range(18)]
    assert statuses.count(503) >= 5
    assert router.metric("kvhearth_router_retries_total") <= 2 + 0.1 * 18


def test_an_engine_that_fails_again_and_again_is_left_alone_and_taken_back_when_it_works(lab):
    poor, good = lab.engine(), lab.engine()
    poor.behave = lab.hang_up()
    resilience = Resilience(failures_to_open=3, open_seconds=0.3, slow_start_seconds=0)
    router = lab.router(poor, good, health=SLOW_CHECKS, resilience=resilience)
    assert [ask(router) for _ in range(12)] == [200] * 12
    assert len(poor.requests) == 3
    assert router.metric("kvhearth_router_breaker_opened_total", engine="e0") == 1
    poor.behave = lab.reply()
    lab.until(lambda: router.metric("kvhearth_router_engines", state="broken") == 0)
    assert [ask(router) for _ in range(8)] == [200] * 8
    assert router.metric("kvhearth_router_engines", state="healthy") == 2
    assert len(poor.requests) >= 5


def test_health_checks_do_not_close_a_breaker_that_requests_opened(lab):
    poor, good = lab.engine(), lab.engine()
    poor.behave = lab.hang_up()
    router = lab.router(poor, good, resilience=Resilience(failures_to_open=2, open_seconds=30))
    for _ in range(8):
        assert ask(router) == 200
    probes = poor.probes
    lab.until(lambda: poor.probes > probes + 5)
    assert ask(router) == 200
    assert len(poor.requests) == 2


def test_case_16_health_checks_do_not_reset_load_counters(lab):
    engine = lab.engine()
    engine.behave = lab.gated(lab.reply())
    router = lab.router(engine)
    wires = [router.wire() for _ in range(3)]
    for wire in wires:
        wire.prompt()
    lab.until(lambda: engine.serving == 3)
    tokens = router.metric("kvhearth_router_in_flight_tokens")
    probes = engine.probes
    lab.until(lambda: engine.probes > probes + 6)
    assert router.metric("kvhearth_router_requests_in_flight") == 3
    assert router.metric("kvhearth_router_in_flight_tokens") == tokens > 0
    engine.let_go(3)
    assert [wire.response()[0] for wire in wires] == [200] * 3


def test_case_16_an_engine_that_drains_ends_its_streams_and_takes_no_new_requests(lab):
    draining, other = lab.engine(), lab.engine()
    pieces = [b"data: %d\n\n" % number for number in range(6)]
    draining.behave = lab.events(pieces, gated=True)
    router = lab.router(draining, other)
    stream = router.wire()
    stream.prompt()
    draining.let_go()
    stream.head()
    assert stream.chunk() == pieces[0]
    router.call(lambda: router.inner.fleet.drain(router.inner.fleet.engine("e0"), drained=True))
    assert [ask(router) for _ in range(6)] == [200] * 6
    assert (len(draining.requests), len(other.requests)) == (1, 6)
    assert router.metric("kvhearth_router_engines", state="draining") == 1
    draining.let_go(5)
    assert b"".join(iter(stream.chunk, b"")) == b"".join(pieces[1:])
    router.call(lambda: router.inner.fleet.drain(router.inner.fleet.engine("e0"), drained=False))
    draining.behave = lab.reply()
    assert [ask(router) for _ in range(4)] == [200] * 4
    assert len(draining.requests) > 1


def test_an_engine_that_comes_back_under_load_is_not_flooded(lab):
    """Slow start: ten requests at once over a warm engine and one that is back this moment."""
    warm, cold = lab.engine(), lab.engine()
    for engine in (warm, cold):
        engine.behave = lab.gated(lab.reply())
    cold.die()
    router = lab.router(warm, cold, resilience=Resilience(slow_start_seconds=30), policy="least-loaded")
    router.call(lambda: setattr(router.inner.fleet.engine("e0"), "up_at", time.monotonic() - 60))
    wires = [router.wire() for _ in range(20)]
    for wire in wires[:10]:
        wire.prompt()
    lab.until(lambda: warm.serving == 10)
    cold.start()
    lab.until(lambda: router.metric("kvhearth_router_engine_capacity", engine="e1") == 2)
    for wire in wires[10:]:
        wire.prompt()
    lab.until(lambda: warm.serving + cold.serving == 20)
    assert cold.serving <= 6, "of ten, which least-loaded would all send there"
    warm.let_go(20)
    cold.let_go(20)
    assert [wire.response()[0] for wire in wires] == [200] * 20
