"""Many open streams, and an engine that takes requests and never answers: health and metrics still answer everybody."""

from __future__ import annotations

from kvhearth.router.config import HealthChecks, Timeouts

STREAMS = 300


def test_streams_that_nobody_reads_and_a_silent_engine_leave_health_and_other_models_alone(lab):
    streaming, silent, other = lab.engine("m"), lab.engine("silent"), lab.engine("other")
    streaming.behave = lab.events([b"data: x\n\n"] * 3, gated=True)
    silent.behave = lab.hang()
    router = lab.router(streaming, silent, other)
    streams = [router.wire() for _ in range(STREAMS)]
    for wire in streams:
        wire.prompt()
    waiting = [router.wire() for _ in range(50)]
    for wire in waiting:
        wire.prompt(model="silent")
    lab.until(lambda: streaming.serving == STREAMS and silent.serving == 50)
    wire = router.wire()
    for _ in range(20):
        assert wire.get("/health")[0] == 200
        assert wire.get("/metrics")[0] == 200
        wire.prompt(model="other")
        assert wire.response()[0] == 200
    assert len(router.inner.fleet.healthy()) == 3, "checks of health did not suffer either"
    streaming.let_go(3 * STREAMS)
    assert [wire.response()[::2] for wire in streams] == [(200, b"data: x\n\n" * 3)] * STREAMS


def test_requests_to_an_engine_that_never_answers_end_by_their_deadline(lab):
    silent = lab.engine()
    silent.behave = lab.hang()
    timeouts = Timeouts(first_byte_seconds=0.3, drain_seconds=0.2, sweep_seconds=0.02)
    router = lab.router(silent, timeouts=timeouts, health=HealthChecks(interval_seconds=0.05))
    waiting = [router.wire() for _ in range(20)]
    for wire in waiting:
        wire.prompt()
    for wire in waiting:
        status, error = wire.error()
        assert (status, error["code"]) == (504, "first_byte_timeout")
    lab.until(lambda: silent.serving == 0)
    assert silent.disconnects == 20
    assert router.wire().get("/health")[0] == 200
