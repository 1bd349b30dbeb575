"""Engines are found in files and by names; what cannot be read changes nothing, and is said once."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from kvhearth.errors import UserError
from kvhearth.metrics import router_discovery as names
from kvhearth.router.config import Discovery as Settings
from kvhearth.router.config import EventSource
from kvhearth.router.discovery.discovery import Discovery
from kvhearth.router.discovery.dns import DnsSource
from kvhearth.router.discovery.file import FileSource, read_members
from kvhearth.router.discovery.member import Member

WHOLE = """
engines:
  - http://127.0.0.1:8001
  - {name: b, url: "http://b:8000", role: prefill, data_parallel: 2, models: [m], draining: true,
     kv_events: "tcp://b:5557", kv_replay: "tcp://b:5558", kv_snapshot: "b:9100"}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "engines.yaml"
    path.write_text(WHOLE)
    return path


class Told:
    def __init__(self) -> None:
        self.sets: list[list[str]] = []

    def __call__(self, members) -> None:
        self.sets.append([member.name for member in members])


def value(discovery: Discovery, metric, *labels: str) -> float:
    [family] = [family for family in discovery.metrics() if family.metric is metric]
    return sum(number for key, number in family.samples if key == labels)


def test_a_file_lists_engines_with_all_that_is_known_of_them(file):
    assert read_members(file) == [
        Member("127.0.0.1:8001", "http://127.0.0.1:8001"),
        Member(
            "b",
            "http://b:8000",
            2,
            "prefill",
            True,
            ("m",),
            EventSource("tcp://b:5557", "tcp://b:5558", "b:9100"),
        ),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("engines: 3", "engines is not a list"),
        ("engines: [{name: a}]", "engines[0]: an engine without a url"),
        ("engines: [{url: 'http://a', rolle: x}]", "'rolle' is not known; did you mean role?"),
        ("engines: [{url: 'http://a', role: cook}]", "'cook' is no role"),
        ("engines: [{url: 'ftp://a'}]", "is not an http URL"),
        ("engines: [{url: 'http://a', data_parallel: no}]", "data_parallel is False"),
        ("engines: [{url: 'http://a', draining: 1}]", "draining is 1"),
        ("engines: [{url: 'http://a', models: m}]", "models is not a list"),
        ("engines: ['http://a', 'http://a']", "'a' is there twice"),
        ("engines: [", "not valid YAML"),
        ("- http://a", "write 'engines:'"),
    ],
)
def test_what_a_file_says_wrong_is_named(file, text, said):
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_members(file)
    assert said in str(caught.value)


def test_an_empty_list_means_that_there_are_none(file):
    file.write_text("engines: []")
    assert read_members(file) == []


async def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(file, caplog):
    source, changes = FileSource(file), []
    await source.once(lambda: changes.append(len(source.members)))
    await source.once(lambda: changes.append(len(source.members)))
    assert changes == [2]
    file.write_text("engines: [")
    for _ in range(3):
        await source.once(lambda: changes.append(len(source.members)))
    assert (changes, len(source.members)) == ([2], 2)
    assert source.failures["invalid"] == 3
    assert sum("cannot tell of engines" in record.message for record in caplog.records) == 1
    other = file.with_name("other")
    other.write_text("engines: ['http://a']")
    os.replace(other, file)
    await source.once(lambda: changes.append(len(source.members)))
    assert changes == [2, 1]
    file.unlink()
    await source.once(lambda: changes.append(len(source.members)))
    assert (source.failures["unreadable"], len(source.members)) == (1, 1)


async def test_the_addresses_of_a_name_are_engines():
    source = DnsSource("localhost:8000", 1.0, kv_events_port=5557)
    await source.once(lambda: None)
    assert Member("127.0.0.1:8000", "http://127.0.0.1:8000", events=EventSource("tcp://127.0.0.1:5557")) in (
        source.members
    )


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (socket.gaierror(socket.EAI_NONAME, "unknown"), 0),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), 1),
        (TimeoutError(), 1),
    ],
)
async def test_a_name_that_is_gone_means_none_and_a_resolver_that_is_away_means_nothing(monkeypatch, error, left):
    source = DnsSource("name:8000", 1.0)
    loop = asyncio.get_running_loop()

    async def answer(*_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8000))]

    async def fail(*_, **__):
        raise error

    monkeypatch.setattr(loop, "getaddrinfo", answer)
    await source.once(lambda: None)
    monkeypatch.setattr(loop, "getaddrinfo", fail)
    await source.once(lambda: None)
    assert len(source.members) == left


async def test_all_sources_make_one_set_in_which_the_named_come_first(file, caplog):
    told = Told()
    discovery = Discovery(Settings(file=file), [Member("b", "http://elsewhere:1"), Member("c", "http://c")])
    assert not discovery.complete
    await discovery.start(told)
    assert discovery.complete
    assert told.sets == [["b", "c", "127.0.0.1:8001"]]
    assert discovery.members[0].url == "http://elsewhere:1"
    assert "b is told of twice" in caplog.text
    assert value(discovery, names.MEMBERS, "named") == 2
    assert value(discovery, names.MEMBERS, "file") == 2
    discovery.name([])
    assert told.sets[-1] == ["127.0.0.1:8001", "b"]
    await discovery.stop()


async def test_a_source_that_cannot_be_read_delays_a_start_and_does_not_stop_it(tmp_path):
    told = Told()
    discovery = Discovery(Settings(file=tmp_path / "none"), [Member("c", "http://c")])
    await discovery.start(told)
    assert (told.sets, discovery.complete) == ([], False)
    [status] = discovery.status()
    assert (status["ok"], status["answered"]) == (False, False)
    assert "No such file" in status["last_error"]
    assert value(discovery, names.FAILURES, "file", "unreadable") == 1
    (tmp_path / "none").write_text("engines: []")
    async with asyncio.timeout(10):
        while not discovery.complete:
            await asyncio.sleep(0.05)
    assert told.sets == [["c"]]
    await discovery.stop()


@pytest.mark.parametrize(
    "bad", [{"ranks": 0}, {"role": "cook"}, {"url": "x"}, {"name": "a b"}, {"events": EventSource("")}]
)
def test_a_member_that_cannot_be_is_refused(bad):
    with pytest.raises(UserError):
        Member(**{"name": "a", "url": "http://a", **bad})
