"""What the router believes of an engine's cache stays true through restarts, lost and reordered events, and resets."""

from __future__ import annotations

import json

import pytest

from kvhearth.routing.chain import block_keys, chain_seed


def prompt_of(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 320))


def believed(emulated, number: int) -> list[int]:
    """Blocks of the prompt that the router knows of in each engine's HBM."""
    keys = block_keys(prompt_of(number), 16, chain_seed("", ""))
    names = [f"e{n}" for n in range(len(emulated.engines))]
    index = emulated.router.inner.kv.index

    async def match() -> list[int]:
        return [hits.hbm for hits in index.match(keys, names)]

    return emulated.lab.router_loop.run(match())


def test_an_engine_that_starts_again_with_sequence_0_loses_its_old_blocks_and_no_other_does(emulate):
    emulated = emulate(2)
    first, second = emulated.engines
    first.compute([*prompt_of(1), 7])
    second.compute([*prompt_of(2), 7])
    emulated.until_all_told()
    assert (believed(emulated, 1), believed(emulated, 2)) == ([20, 0], [0, 20])
    first.faults(restart=True)
    first.compute([*prompt_of(3), 7])
    emulated.lab.until(lambda: believed(emulated, 3) == [20, 0], "the restarted engine is followed")
    assert (believed(emulated, 1), believed(emulated, 2)) == ([0, 0], [0, 20])


@pytest.mark.parametrize("fault", ["drop_events", "reorder_events", "duplicate_events"])
def test_events_that_are_lost_reordered_or_doubled_heal(emulate, fault):
    emulated = emulate(1)
    engine = emulated.engines[0]
    engine.faults(**{fault: 0.5, "seed": 5})
    for number in range(1, 9):
        engine.compute([*prompt_of(number), 7])
    engine.faults(**{fault: 0.0})
    engine.compute([*prompt_of(9), 7])
    everything = [[20]] * 9
    emulated.lab.until(lambda: [believed(emulated, number) for number in range(1, 10)] == everything, "it is healed")


def test_a_reset_of_the_engines_cache_empties_what_is_believed_of_it(emulate):
    """As in vLLM, `AllBlocksCleared` goes out with the engine's next step."""
    emulated = emulate(1)
    engine = emulated.engines[0]
    engine.compute([*prompt_of(1), 7])
    emulated.lab.until(lambda: believed(emulated, 1) == [20])
    assert engine.http.post("/reset_prefix_cache").status_code == 200
    engine.compute([*prompt_of(2), 7])
    emulated.lab.until(lambda: believed(emulated, 2) == [20])
    assert believed(emulated, 1) == [0]


def test_blocks_that_the_engine_evicts_are_believed_no_longer(emulate):
    emulated = emulate(1, num_gpu_blocks_override=65)
    engine = emulated.engines[0]
    engine.compute([*prompt_of(1), 7])
    emulated.lab.until(lambda: believed(emulated, 1) == [20])
    for number in range(2, 8):
        engine.compute([*prompt_of(number), 7])
    emulated.lab.until(lambda: believed(emulated, 1) == [0] and believed(emulated, 7) == [20])


def test_a_router_that_comes_late_learns_what_is_there_already(emulate, lab):
    emulated = emulate(1)
    emulated.engines[0].compute([*prompt_of(1), 7])
    late = lab.router(*emulated.engines, policy="kv-aware", kv=emulated.router.config.kv)
    wire = late.wire()

    def hit() -> str:
        wire.post(json.dumps({"model": "m", "prompt": [*prompt_of(1), 8], "max_tokens": 1}).encode())
        return dict(wire.response()[1])["x-kvhearth-hit"]

    lab.until(lambda: late.metric("kvhearth_router_index_blocks", tier="hbm") >= 20, "the past is replayed")
    emulated.after_a_sweep()
    assert hit().startswith("tokens=320, hbm=320")
