"""Whatever the store does, the engine goes on and reads no wrong KV: real Scheduler, real connector, real bytes.

Each test is a fault that some system has shipped. `Rig` raises `WrongKv` when a step would read anything but what must
be there, so a run that ends is a run whose every token was right.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError

from .rig import BLOCK, Rig, tokens
from .servers import StoreProcess

PROMPT = tokens(1, 10 * BLOCK + 3)
CHUNKS = 10


def filled(store: StoreProcess) -> list[bytes]:
    """Another engine has put the prompt's chunks; their names in order."""
    with Rig(store=store.address) as other:
        other.run("first", PROMPT)
        names = other.tier._admission.known
    assert store.count() == len(names) == CHUNKS
    return names


def counted(rig: Rig, name: str) -> float:
    return sum(value for key, value in rig.stats.items() if key.startswith(name))


def test_a_second_engine_takes_from_the_store_what_the_first_computed(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address) as rig:
        assert rig.run("again", PROMPT) == CHUNKS * BLOCK
        assert rig.stats["kvhearth_connector_get_bytes"] == CHUNKS * rig.tier._row_bytes


def test_with_nothing_to_compute_the_store_is_read_in_the_step_that_asked(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(store)
    monkeypatch.setattr("kvhearth.connector.scheduler._IDLE_STEP_SECONDS", 10.0)
    with Rig(store=store.address) as rig:
        rig.submit("again", PROMPT)
        rig.step()
        assert rig.tier._jobs
        rig.finish()


def test_while_others_compute_no_answer_is_awaited(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store)
    with Rig(store=store.address) as rig:
        rig.submit("running", tokens(2, BLOCK), output=200)
        rig.step_until(lambda: any(request.num_output_tokens for request in rig.scheduler.running))
        monkeypatch.setattr(rig.tier, "ask_at_once", lambda seconds: pytest.fail("the scheduler waited"))
        rig.submit("again", PROMPT)
        rig.step_until(lambda: rig.tier._jobs)
        rig.finish()


def test_store_dead_at_start(fake_store: Any) -> None:
    with Rig(store="127.0.0.1:1") as rig:
        assert rig.run("a", PROMPT) == 0
        rig.forget_hbm()
        assert rig.run("b", PROMPT) == CHUNKS * BLOCK  # DRAM serves as ever
        rig.step_until(lambda: rig.stats.get("kvhearth_connector_store_up") == 0)


def test_store_killed_and_back(store: StoreProcess) -> None:
    with Rig(store=store.address) as rig:
        rig.run("a", PROMPT)
        store.kill()
        rig.forget_hbm()
        rig.forget_dram()
        assert rig.run("b", PROMPT) == 0
        rig.run("c", tokens(3, 100))
        store.start()
        deadline = time.monotonic() + 20
        seed = 100
        while store.count() < CHUNKS and time.monotonic() < deadline:
            rig.run(f"d{seed}", tokens(seed, 33))
            seed += 1
            time.sleep(0.1)
        # Healed by itself: what comes now is stored, and what DRAM held all along is offered again.
        rig.forget_hbm()
        rig.run("e", PROMPT)
        rig.finish()
        rig.forget_hbm()
        rig.forget_dram()
        assert rig.run("f", PROMPT) == CHUNKS * BLOCK
        rig.step_until(lambda: rig.stats.get("kvhearth_connector_store_up") == 1)


def test_store_restarted_quickly_between_lookup_and_load(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address) as rig:
        load = rig.tier._transfers.load

        def restart_first(*args: Any) -> None:
            store.kill()
            store.start()
            load(*args)

        rig.tier._transfers.load = restart_first
        assert rig.run("a", PROMPT) == 0
        assert counted(rig, "kvhearth_connector_get_failures") == CHUNKS


@pytest.mark.parametrize("gone", [[0], [4], [9], list(range(10))])
def test_chunk_evicted_between_lookup_and_load(store: StoreProcess, gone: list[int]) -> None:
    filled(store)
    with Rig(store=store.address) as rig:
        load = rig.tier._transfers.load

        def evict_first(job_id: int, keys: Any, rows: Any) -> None:
            for index in gone:
                store.command(b"DEL", keys[index])
            load(job_id, keys, rows)

        rig.tier._transfers.load = evict_first
        assert rig.run("a", PROMPT) == gone[0] * BLOCK
        assert rig.stats["kvhearth_connector_get_failures{absent}"] == len(gone)


def test_store_that_accepts_and_never_answers(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address, tier={"lookup_timeout_seconds": 0.05}) as rig:
        rig.run("warm", tokens(9, 40))
        store.stop_for_a_while()
        try:
            assert rig.run("a", PROMPT) == 0
            # The request may be told by its own clock, before the thread that asks has given up.
            rig.step_until(lambda: rig.stats.get("kvhearth_connector_lookups{timeout}", 0) >= 1)
        finally:
            store.go_on()


def test_store_that_stalls_in_the_middle_of_a_load(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address, tier={"load_timeout_seconds": 0.3}) as rig:
        load = rig.tier._transfers.load

        def stall_first(*args: Any) -> None:
            store.stop_for_a_while()
            load(*args)

        rig.tier._transfers.load = stall_first
        try:
            assert rig.run("a", PROMPT) == 0
            assert counted(rig, "kvhearth_connector_get_failures") == CHUNKS
        finally:
            store.go_on()


@pytest.mark.parametrize("at", [70, -1, 3, 20])
def test_corrupt_value_is_computed_again_and_removed(store: StoreProcess, at: int) -> None:
    corrupted = filled(store)[2]
    value = bytearray(store.command(b"GET", corrupted))
    value[at] ^= 0xFF
    store.command(b"SET", corrupted, bytes(value))
    with Rig(store=store.address) as rig:
        assert rig.run("a", PROMPT) < CHUNKS * BLOCK
        assert counted(rig, "kvhearth_connector_get_failures") == 1
        rig.forget_hbm()
        rig.forget_dram()
        rig.run("b", PROMPT)
        rig.finish()
        rig.forget_hbm()
        rig.forget_dram()
        assert rig.run("c", PROMPT) == CHUNKS * BLOCK  # put again, rightly


def test_another_keys_bytes_under_a_key(store: StoreProcess) -> None:
    first, second, *_ = filled(store)
    store.command(b"SET", first, store.command(b"GET", second))
    with Rig(store=store.address) as rig:
        assert rig.run("a", PROMPT) < CHUNKS * BLOCK
        assert rig.stats["kvhearth_connector_get_failures{checksum}"] == 1


@pytest.mark.parametrize("length", [0, 10, 64, 1000])
def test_truncated_value(store: StoreProcess, length: int) -> None:
    key = filled(store)[3]
    store.command(b"SET", key, store.command(b"GET", key)[:length])
    with Rig(store=store.address) as rig:
        assert rig.run("a", PROMPT) < CHUNKS * BLOCK
        assert counted(rig, "kvhearth_connector_get_failures") == 1


def test_store_that_lies_about_presence(fake_store: Callable[[Any], str]) -> None:
    def lie(command: list[bytes]) -> bytes:
        name = command[0].upper()
        replies = {
            b"EXISTS": b":1\r\n",
            b"GET": b"$-1\r\n",
            b"SET": b"+OK\r\n",
            b"DEL": b":0\r\n",
            b"PING": b"+PONG\r\n",
        }
        return replies.get(name, b"-ERR unknown command\r\n")

    with Rig(store=fake_store(lie)) as rig:
        for turn in range(3):
            assert rig.run(f"a{turn}", tokens(turn, 200)) == 0
        assert counted(rig, "kvhearth_connector_get_failures") == 3 * 12


def test_store_that_drops_every_reply(fake_store: Callable[[Any], str]) -> None:
    quick = {"lookup_timeout_seconds": 0.05, "load_timeout_seconds": 0.2, "put_timeout_seconds": 0.2}
    with Rig(store=fake_store(lambda command: None), tier=quick) as rig:
        for turn in range(4):
            assert rig.run(f"a{turn}", tokens(turn, 200)) == 0


def test_store_that_speaks_nonsense(fake_store: Callable[[Any], str]) -> None:
    with Rig(store=fake_store(lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n")) as rig:
        assert rig.run("a", PROMPT) == 0


def test_full_store_refuses_and_the_engine_goes_on() -> None:
    small = StoreProcess("1MiB")
    small.start()
    try:
        with Rig(store=small.address, blocks=80, blocks_per_chunk=4, dram_chunks=200) as rig:
            for seed in range(20):
                rig.run(f"a{seed}", tokens(seed, 300))
            for seed in range(20):
                rig.run(f"b{seed}", tokens(seed, 300))
    finally:
        small.kill()


def test_dram_smaller_than_a_prompt_with_hits_parked(store: StoreProcess) -> None:
    """Fetched chunks of several requests push each other out of a DRAM too small for one; none waits for ever."""
    for seed in range(3):
        with Rig(store=store.address, dram_chunks=64) as other:
            other.run("first", tokens(seed, 20 * BLOCK + 1))
    with Rig(store=store.address, blocks=100, dram_chunks=8) as rig:
        for turn in range(9):
            rig.submit(f"a{turn}", tokens(turn % 3, 20 * BLOCK + 1))
        rig.finish(60)
        assert rig.side.manager.primary_tier._num_write_pending_chunks == 0


def test_dram_full_of_chunks_in_flight(store: StoreProcess) -> None:
    with Rig(store=store.address, blocks=100, dram_chunks=4) as rig:
        store.stop_for_a_while()
        try:
            for turn in range(6):
                rig.submit(f"a{turn}", tokens(turn, 12 * BLOCK))
            rig.finish(60)
        finally:
            store.go_on()


def test_back_pressure_drops_tails_never_heads(store: StoreProcess) -> None:
    with Rig(store=store.address, tier={"max_put_bytes": 4 * 2 * 2 * BLOCK * 32 * 4}) as rig:
        rig.run("a", PROMPT)
        assert rig.stats["kvhearth_connector_put_chunks{stored}"] == 4
        assert rig.stats["kvhearth_connector_put_chunks{dropped}"] == 6
    with Rig(store=store.address) as other:
        assert other.run("b", PROMPT) == 4 * BLOCK


def test_what_was_dropped_is_offered_again(store: StoreProcess) -> None:
    with Rig(store=store.address, tier={"max_put_bytes": 4 * 2 * 2 * BLOCK * 32 * 4}) as rig:
        for turn in range(3):
            rig.run(f"a{turn}", PROMPT)
    assert store.count() == CHUNKS


def test_put_of_what_the_store_has_moves_nothing(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address, tier={"lookup_timeout_seconds": 0.0001}) as rig:  # too short to find anything
        rig.run("a", PROMPT)
        assert rig.stats.get("kvhearth_connector_put_bytes", 0) == 0
        assert rig.stats["kvhearth_connector_put_chunks{present}"] == CHUNKS


def test_second_sight_puts_what_a_second_request_needs(store: StoreProcess) -> None:
    with Rig(store=store.address, tier={"store_admission": "second-sight"}) as rig:
        rig.run("a", PROMPT)
        assert store.count() == 0
        rig.run("b", PROMPT[: 6 * BLOCK + 1])
        assert store.count() == 6


def test_plain_redis_serves_too(tmp_path: Path) -> None:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
    address = tmp_path / "redis.sock"
    server = subprocess.Popen([program, "--port", "0", "--unixsocket", str(address), "--save", ""])
    try:
        deadline = time.monotonic() + 10
        while not address.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        with Rig(store=f"unix:{address}") as rig:
            rig.run("a", PROMPT, params={"kvhearth": {"pin": True}})
        with Rig(store=f"unix:{address}") as rig:
            assert rig.run("b", PROMPT) == CHUNKS * BLOCK
    finally:
        server.terminate()
        server.wait()


def test_pinned_chunks_stay_when_the_store_is_full() -> None:
    small = StoreProcess("1MiB")
    small.start()
    try:
        with Rig(store=small.address) as rig:
            rig.run("system", PROMPT, params={"kvhearth": {"pin": True}})
            for seed in range(2, 30):
                rig.run(f"a{seed}", tokens(seed, 150))
        with Rig(store=small.address) as other:
            assert other.run("b", PROMPT) == CHUNKS * BLOCK
    finally:
        small.kill()


def test_what_is_pinned_goes_to_the_store_at_once_also_when_admission_is_lazy(store: StoreProcess) -> None:
    with Rig(store=store.address, blocks=200, extra={"dram_admission": "lazy"}) as rig:
        rig.run("other", tokens(7, 200))
        assert store.count() == 0
        rig.run("system", PROMPT, params={"kvhearth": {"pin": True}})
        assert store.count() == CHUNKS
    assert b"pinned_bytes:0\r" not in store.command(b"INFO")


def test_two_salts_never_share(store: StoreProcess) -> None:
    with Rig(store=store.address) as rig:
        rig.run("a", PROMPT, salt="tenant-a")
    with Rig(store=store.address) as rig:
        assert rig.run("b", PROMPT, salt="tenant-b") == 0
        assert rig.run("plain", PROMPT) == 0
        assert rig.run("a", PROMPT, salt="tenant-a") == CHUNKS * BLOCK
    groups = [line for line in store.command(b"INFO").decode().splitlines() if line.startswith("group_")]
    assert len(groups) == 3, groups  # two tenants and those without
    assert not any("tenant" in line for line in groups)


def test_reset_means_that_the_store_is_not_believed_any_more(store: StoreProcess) -> None:
    """Weights may have changed: KV from before would be wrong."""
    with Rig(store=store.address) as rig:
        rig.run("a", PROMPT)
        assert rig.scheduler.reset_prefix_cache(reset_connector=True)
        rig.weights = "new"
        assert rig.run("b", PROMPT) == 0
        rig.forget_hbm()
        rig.forget_dram()
        assert rig.run("c", PROMPT) == CHUNKS * BLOCK  # its own, from after
        assert rig.stats["kvhearth_connector_epochs"] == 1


def test_request_that_ran_before_a_reset_puts_nothing_under_the_new_weights(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(store=store.address, batched_tokens=32) as rig:
        with monkeypatch.context() as held:  # copies to DRAM end, and nobody is told until after the reset
            held.setattr(rig.worker.connector_worker.worker, "get_finished", list)
            rig.submit("slow", PROMPT)
            rig.step_until(lambda: rig.side._jobs and rig.scheduler.running)
            rig.side.reset_cache()
        rig.finish()
        assert store.count() == 0


def test_request_that_waited_before_a_reset_puts_nothing_under_the_new_weights(store: StoreProcess) -> None:
    with Rig(store=store.address, batched_tokens=32) as rig:
        rig.submit("waits", PROMPT)
        rig.side.reset_cache()
        rig.finish()
        assert rig.stats["kvhearth_connector_put_chunks{stale}"] == CHUNKS
        assert store.count() == 0


def test_promise_of_a_prefill_engine_is_awaited(store: StoreProcess) -> None:
    with Rig(store=store.address) as prefill, Rig(store=store.address) as decode:
        params = {"kvhearth": {"await_tokens": CHUNKS * BLOCK, "await_seconds": 20}}
        decode.submit("d", PROMPT, params=params)
        for _ in range(20):
            decode.step()
            time.sleep(0.005)
        assert decode.scheduler.waiting
        prefill.run("p", PROMPT, 1)
        decode.finish()
        assert decode.hits["d"] == CHUNKS * BLOCK
        assert decode.stats["kvhearth_connector_awaited{kept}"] == 1


def test_promise_that_is_not_kept_ends_in_recompute_at_its_deadline(store: StoreProcess) -> None:
    with Rig(store=store.address) as decode:
        started = time.monotonic()
        params = {"kvhearth": {"await_tokens": CHUNKS * BLOCK, "await_seconds": 0.5}}
        assert decode.run("d", PROMPT, params=params) == 0
        assert time.monotonic() - started >= 0.5
        decode.step_until(lambda: decode.stats.get("kvhearth_connector_awaited{late}") == 1)


def test_dram_too_small_for_a_chunk_is_refused() -> None:
    with pytest.raises(UserError, match=r"cpu_bytes_to_use: .* chunks of .*; raise it"):
        Rig(dram_chunks=1)


def test_shared_memory_too_small_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"cpu_bytes_to_use: .*/dev/shm has .* free; lower it, or .*--shm-size"):
        Rig(dram_chunks=1 << 30)


def test_aborts_while_everything_is_under_way(store: StoreProcess) -> None:
    filled(store)
    with Rig(store=store.address, blocks=60) as rig:
        for turn in range(30):
            rig.submit(f"a{turn}", PROMPT[: (turn % 10 + 1) * BLOCK + 1], 5)
            rig.step()
            if turn % 3 == 0:
                rig.abort(f"a{turn}")
        rig.finish()
        assert rig.tier._lookups.open_requests == 0
        assert not rig.tier._jobs
        primary = rig.side.manager.primary_tier  # no row is held for a request that is gone
        assert primary._num_evictable_cache_chunks == primary._num_allocated_chunks - len(primary._free_list)


@pytest.mark.parametrize("admission", ["eager", "lazy"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_reset_while_requests_run_saves_nothing_of_before(admission: str, hybrid: bool) -> None:
    """vLLM refuses to reset HBM then, and resets the connector all the same."""
    with Rig(blocks=60, dram_chunks=200, hybrid=hybrid, batched_tokens=64, extra={"dram_admission": admission}) as rig:
        for turn in range(4):
            rig.submit(f"a{turn}", tokens(turn, 180), 30)
        for _ in range(12):
            rig.step()
        assert rig.scheduler.running
        rig.scheduler.reset_prefix_cache(reset_connector=True)
        for turn in range(4, 12):
            rig.submit(f"a{turn}", tokens(turn, 180), 10)
        rig.finish()
        rig.forget_hbm()
        assert [rig.run(f"b{turn}", tokens(turn, 180)) for turn in range(2)] == [0, 0]  # those that ran
        for turn in range(4, 12):
            rig.run(f"c{turn}", tokens(turn, 100))


def test_second_sight_is_not_fooled_by_lazy_saves(store: StoreProcess) -> None:
    tier = {"store_admission": "second-sight"}
    with Rig(store=store.address, blocks=24, dram_chunks=12, tier=tier, extra={"dram_admission": "lazy"}) as rig:
        for seed in range(12):
            rig.run(f"a{seed}", tokens(seed, 200))
        assert store.count() == 0


def test_lazy_without_prefix_caching_is_refused() -> None:
    def without(config: Any) -> None:
        config.cache_config.enable_prefix_caching = False

    with pytest.raises(UserError, match="dram_admission: 'lazy' without prefix caching"):
        Rig(extra={"dram_admission": "lazy"}, tweak=without)


def test_workers_on_several_hosts_are_refused_with_a_store(store: StoreProcess) -> None:
    def spread(config: Any) -> None:
        config.parallel_config.nnodes = 2
        config.parallel_config.world_size = 2

    with pytest.raises(UserError, match="several hosts"):
        Rig(store=store.address, tweak=spread)
