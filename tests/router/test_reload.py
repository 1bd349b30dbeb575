"""A running router's configuration follows its file, keeps the last good one, and says what it refused and why."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.router import reload
from kvhearth.router.config import EventSource, KvSettings, Limits, RouterConfig, Timeouts
from kvhearth.router.reload import NEEDS_RESTART, Reloader, changed
from kvhearth.router.settings import LEAVES, read_router_settings

DEADLINE_SECONDS = 30.0
GOOD = "engines: [a=http://h:1]\ntimeouts: {connect_seconds: %s}\n"


class Lab:
    """A file, a reloader that follows it, and what was put in force."""

    def __init__(self, path: Path, flags: dict[str, Any] | None = None, text: str = GOOD % 5) -> None:
        self.path = path
        self.now = 100.0
        self.reads = 0
        self.applied: list[RouterConfig] = []
        self.environ: dict[str, str] = {}
        path.write_text(text)

        def read() -> RouterConfig:
            self.reads += 1
            return read_router_settings(flags or {}, self.environ, path)

        self.read = read
        self.reloader = Reloader(path, read, self.applied.append, read(), lambda: self.now, 0.01)
        self.reads = 0

    def write(self, text: str) -> None:
        """As careful editors do it: the file is there at once and whole."""
        new = self.path.with_name("new")
        new.write_text(text)
        new.replace(self.path)

    async def settle(self) -> None:
        """Look as often as it takes for a change to be seen."""
        for _ in range(3):
            await self.reloader.look()

    @property
    def connect_seconds(self) -> float:
        return self.reloader.in_force.timeouts.connect_seconds


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path / "router.yaml")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not true():
            await asyncio.sleep(0.01)


class TestAFileThatChanges:
    async def test_is_put_in_force(self, lab: Lab) -> None:
        lab.write(GOOD % 7)
        lab.now = 200.0
        await lab.settle()
        assert [config.timeouts.connect_seconds for config in lab.applied] == [7]
        assert (lab.connect_seconds, lab.reloader.generation, lab.reloader.loaded_at) == (7, 2, 200.0)

    async def test_is_not_read_while_it_is_written(self, lab: Lab) -> None:
        await lab.settle()
        reads = lab.reads
        for length in range(1, 9):
            lab.path.write_text((GOOD % 9)[: 4 * length])
            await lab.reloader.look()
        assert lab.reads == reads
        lab.path.write_text(GOOD % 9)
        await lab.settle()
        assert (lab.connect_seconds, lab.reloader.failures) == (9, 0)

    async def test_is_seen_also_where_a_link_is_replaced(self, tmp_path: Path) -> None:
        for name, seconds in (("one", 1), ("two", 2)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "router.yaml").write_text(GOOD % seconds)
            os.utime(tmp_path / name / "router.yaml", (1, 1))
        (tmp_path / "..data").symlink_to("one")
        link = tmp_path / "router.yaml"
        link.symlink_to(Path("..data") / "router.yaml")
        reloader = Reloader(
            link,
            lambda: read_router_settings({}, {}, link),
            lambda _: None,
            read_router_settings({}, {}, link),
        )
        await reloader.look()
        (tmp_path / "..new").symlink_to("two")
        (tmp_path / "..new").replace(tmp_path / "..data")
        for _ in range(3):
            await reloader.look()
        assert reloader.in_force.timeouts.connect_seconds == 2

    async def test_is_read_once_and_one_that_stays_is_not_read(self, lab: Lab) -> None:
        for _ in range(3):
            await lab.settle()
        assert lab.reads == 1  # the first look, for a change since the start
        lab.write(GOOD % 7)
        for _ in range(3):
            await lab.settle()
        assert (lab.reads, len(lab.applied)) == (2, 1)

    async def test_is_not_missed_between_the_start_and_the_first_look(self, tmp_path: Path) -> None:
        path = tmp_path / "router.yaml"
        path.write_text(GOOD % 5)
        in_force = read_router_settings({}, {}, path)
        path.write_text(GOOD % 6)
        reloader = Reloader(path, lambda: read_router_settings({}, {}, path), lambda _: None, in_force)
        await reloader.look()
        assert reloader.in_force.timeouts.connect_seconds == 6

    async def test_that_says_the_same_changes_nothing(self, lab: Lab) -> None:
        lab.write("# a comment\n" + GOOD % 5)
        await lab.settle()
        assert (lab.applied, lab.reloader.generation, lab.reads) == ([], 1, 1)

    async def test_does_not_win_over_flags_and_the_environment(self, tmp_path: Path) -> None:
        lab = Lab(tmp_path / "router.yaml", {"timeouts.connect_seconds": "3"})
        lab.environ["KVHEARTH_ROUTER_TIMEOUTS_IDLE_SECONDS"] = "4"
        lab.write(GOOD.replace("}", ", idle_seconds: 9, drain_seconds: 9}") % 7)
        await lab.settle()
        timeouts = lab.reloader.in_force.timeouts
        assert (timeouts.connect_seconds, timeouts.idle_seconds, timeouts.drain_seconds) == (3, 4, 9)


class TestAFileThatIsBroken:
    @pytest.mark.parametrize("text", ["timeouts: [", "timeouts: {connect_seconds: 0}", "engines: []", "", "zzz: 1"])
    async def test_leaves_the_last_good_one_in_force_until_it_is_good_again(self, lab: Lab, text: str) -> None:
        lab.write(GOOD % 7)
        await lab.settle()
        lab.now = 300.0
        lab.write(text)
        await lab.settle()
        assert (lab.connect_seconds, lab.reloader.generation, lab.reloader.loaded_at) == (7, 2, 100.0)
        assert lab.reloader.failures == 1
        assert lab.reloader.last_error
        lab.write(GOOD % 8)
        await lab.settle()
        assert (lab.connect_seconds, lab.reloader.generation, lab.reloader.last_error) == (8, 3, "")
        assert (lab.reloader.failures, lab.reloader.loaded_at) == (1, 300.0)
        assert len(lab.applied) == 2

    async def test_that_goes_and_comes_back_is_no_harm(self, lab: Lab) -> None:
        await lab.settle()
        away = lab.path.rename(lab.path.with_name("away"))
        await lab.settle()
        assert "cannot read" in lab.reloader.last_error
        away.rename(lab.path)
        await lab.settle()
        assert (lab.reloader.last_error, lab.connect_seconds, lab.applied) == ("", 5, [])

    async def test_is_logged_once_for_each_reason(self, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        lab.write("zzz: 1")
        for _ in range(4):
            await lab.reloader.reload()
        assert lab.reloader.failures == 4
        assert len(caplog.records) == 1
        assert "the configuration stays as it was: " in caplog.text
        assert "'zzz' is not a setting" in caplog.text
        lab.write("yyy: 1")
        await lab.reloader.reload()
        assert len(caplog.records) == 2

    async def test_says_what_is_wrong_to_who_asked(self, lab: Lab) -> None:
        lab.write("zzz: 1")
        outcome = await lab.reloader.reload()
        assert outcome.changed == []
        assert outcome.error.startswith(f"{lab.path}: 'zzz' is not a setting")


class TestWhatNeedsARestart:
    async def test_is_refused_as_a_whole_and_named_with_the_remedy(self, lab: Lab) -> None:
        lab.write(GOOD % 7 + "listen: 127.0.0.1:9999\npolicy: random\n")
        outcome = await lab.reloader.reload()
        assert outcome.error == (
            f"{lab.path}: listen, policy cannot change while the router runs; "
            "restart the router, or take that change back"
        )
        assert (lab.applied, lab.connect_seconds, lab.reloader.generation) == ([], 5, 1)

    async def test_is_refused_for_a_key_without_showing_it(self, lab: Lab) -> None:
        lab.environ["KVHEARTH_ROUTER_API_KEY"] = "hush"
        outcome = await lab.reloader.reload()
        assert "api_key cannot change" in outcome.error
        assert "hush" not in outcome.error

    async def test_the_policy_counts_also_where_it_follows_from_something_else(self, lab: Lab) -> None:
        lab.write("engines: [{name: a, url: http://h:1, kv_events: 'tcp://h:2'}]\ntimeouts: {connect_seconds: 5}")
        outcome = await lab.reloader.reload()
        assert "policy" in outcome.error

    def test_is_what_the_configuration_says(self) -> None:
        assert {"listen", "policy", "api_key", "prefix.max_pieces"} <= NEEDS_RESTART
        assert not {"engines", "aliases", "timeouts.connect_seconds", "limits.max_body_bytes"} & NEEDS_RESTART


class TestWhatChanged:
    BASE = RouterConfig(engines=[("a", "http://h:1")])

    def test_nothing_between_equals(self) -> None:
        assert changed(self.BASE, replace(self.BASE, engines=(("a", "http://h:1"),), models=[])) == []

    def test_is_named_by_group_and_name(self) -> None:
        other = replace(
            self.BASE,
            listen_host="localhost",
            listen_port=1,
            aliases={"x": "y"},
            timeouts=Timeouts(idle_seconds=1),
            limits=Limits(max_connections=1),
            kv=KvSettings(events={"a": EventSource("tcp://h:2")}, store_password="hush"),
        )
        assert changed(self.BASE, other) == [
            *("listen", "policy", "aliases", "limits.max_connections", "timeouts.idle_seconds"),
            *("kv.events", "kv.store_password"),
        ]

    def test_finds_each_single_setting(self) -> None:
        base = replace(self.BASE, policy="prefix")
        found = {}
        for leaf in LEAVES:
            default = leaf.field.default
            if type(default) not in (int, float):
                continue
            value = default / 2 if isinstance(default, float) else default + 1
            owner = getattr(base, leaf.group) if leaf.group else base
            with contextlib.suppress(UserError):
                other = replace(owner, **{leaf.field.name: value})
                found[leaf.path] = changed(base, replace(base, **{leaf.group: other}) if leaf.group else other)
        assert len(found) > 30
        for path, names in found.items():
            assert names == ["listen" if path == "listen_port" else path]


class TestAsking:
    async def test_reads_again_though_the_file_is_the_same(self, lab: Lab) -> None:
        lab.environ["KVHEARTH_ROUTER_TIMEOUTS_IDLE_SECONDS"] = "4"
        outcome = await lab.reloader.reload()
        assert outcome == (["timeouts.idle_seconds"], "")

    async def test_works_without_a_file(self) -> None:
        environ: dict[str, str] = {}

        def read() -> RouterConfig:
            return read_router_settings({"engines": ["http://h:1"]}, environ)

        reloader = Reloader(None, read, lambda _: None, read())
        assert await reloader.look() is None
        environ["KVHEARTH_ROUTER_SESSION_HEADER"] = "x-user"
        assert (await reloader.reload()).changed == ["session_header"]

    async def test_waits_for_what_is_put_in_force_and_keeps_the_old_one_where_that_fails(self, lab: Lab) -> None:
        async def refuse(config: RouterConfig) -> None:
            await asyncio.sleep(0)
            raise UserError("not that", where="engines", remedy="use others")

        reloader = Reloader(lab.path, lab.read, refuse, lab.read())
        lab.write(GOOD % 7)
        assert (await reloader.reload()).error == "engines: not that; use others"
        assert (reloader.in_force.timeouts.connect_seconds, reloader.generation) == (5, 1)

    async def test_by_several_at_once_is_done_one_after_the_other(self, lab: Lab) -> None:
        busy: list[int] = []

        async def apply(config: RouterConfig) -> None:
            busy.append(1)
            assert len(busy) == 1
            await asyncio.sleep(0.01)
            busy.pop()

        reloader = Reloader(lab.path, lab.read, apply, lab.read())
        lab.write(GOOD % 7)
        outcomes = await asyncio.gather(*[reloader.reload() for _ in range(5)])
        assert sorted(len(outcome.changed) for outcome in outcomes) == [0, 0, 0, 0, 1]

    async def test_a_read_that_does_not_end_is_given_up(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reload, "READ_SECONDS", 0.05)
        goes_on = asyncio.Event()
        loop = asyncio.get_running_loop()

        def read() -> RouterConfig:
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(DEADLINE_SECONDS)
            return lab.read()

        reloader = Reloader(lab.path, read, lambda _: None, lab.read())
        outcome = await reloader.reload()
        goes_on.set()
        assert "reading took more than" in outcome.error


class TestWatching:
    @pytest.fixture
    async def watched(self, lab: Lab) -> AsyncIterator[Lab]:
        task = asyncio.create_task(lab.reloader.watch())
        yield lab
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_follows_the_file(self, watched: Lab) -> None:
        for text, wanted in ((GOOD % 7, 7), ("zzz: 1", 7), (GOOD % 8, 8)):
            watched.write(text)
            await until(
                lambda wanted=wanted, text=text: (
                    watched.connect_seconds == wanted and bool(watched.reloader.last_error) == (text == "zzz: 1")
                )
            )

    async def test_reloads_when_asked(self, watched: Lab) -> None:
        await until(lambda: watched.reads > 0)
        watched.environ["KVHEARTH_ROUTER_TIMEOUTS_IDLE_SECONDS"] = "4"
        watched.reloader.ask()
        await until(lambda: watched.reloader.in_force.timeouts.idle_seconds == 4)

    async def test_goes_on_after_a_bug(self, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
        broken = True

        def read() -> RouterConfig:
            if broken:
                raise RuntimeError("wires crossed")
            return lab.read()

        reloader = Reloader(lab.path, read, lambda _: None, lab.read(), poll_seconds=0.01)
        task = asyncio.create_task(reloader.watch())
        await until(lambda: "wires crossed" in caplog.text)
        assert (reloader.failures, reloader.last_error) == (1, "this is a bug: RuntimeError")
        broken = False
        lab.write(GOOD % 7)
        await until(lambda: reloader.in_force.timeouts.connect_seconds == 7)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
