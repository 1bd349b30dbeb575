"""Where a ring's nodes come from, and that what is wrong there never takes away the nodes that were known."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.store.ring.members import MAX_NODES, Members

SECONDS = 10.0


class TestAList:
    def test_nodes_with_commas_between(self) -> None:
        members = Members("a:7420, [::1]:7421,unix:/run/s")
        assert members.nodes == ("a:7420", "[::1]:7421", "unix:/run/s")
        assert not members.is_live
        assert members.interval_seconds == math.inf
        assert not members.refresh(SECONDS)

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("", "''"),
            ("a:7420,,b:7420", "''"),
            ("a:7420,b", "'b'"),
            ("a:7420,b:99999", "'b:99999'"),
            ("a:7420,a:7420", "a:7420 is named twice"),
            ("file:nodes", "'file:nodes'"),
            ("dns:name", "'dns:name'"),
            ("dns::7420", "'dns::7420'"),
            ("dns:a b:7420", "'dns:a b:7420'"),
            (",".join(f"n{number}:1" for number in range(MAX_NODES + 1)), f"more than {MAX_NODES} nodes"),
        ],
    )
    def test_a_bad_part_is_named(self, text: str, part: str) -> None:
        with pytest.raises(UserError, match="store_address") as error:
            Members(text, where="store_address")
        assert part in str(error.value)
        assert error.value.remedy


class TestAFile:
    def test_a_node_a_line_with_comments(self, tmp_path: Path) -> None:
        path = tmp_path / "nodes"
        path.write_text("# the stores\n\na:7420\n  b:7420  # rack 2\n")
        members = Members(f"file:{path}")
        assert members.is_live
        assert members.nodes == ("a:7420", "b:7420")
        assert not members.refresh(SECONDS)

    def test_a_change_is_seen_and_order_is_none(self, tmp_path: Path) -> None:
        path = tmp_path / "nodes"
        path.write_text("a:7420\nb:7420\n")
        members = Members(f"file:{path}")
        path.write_text("b:7420\na:7420\n")
        assert not members.refresh(SECONDS)
        path.write_text("a:7420\nc:7420\n")
        assert members.refresh(SECONDS)
        assert members.nodes == ("a:7420", "c:7420")

    def test_the_last_good_nodes_stay_and_one_line_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "nodes"
        path.write_text("a:7420\nb:7420\n")
        members = Members(f"file:{path}")
        with caplog.at_level(logging.INFO, "kvhearth.store.ring.members"):
            for wrong in (b"", b"# none\n", b"a:7420\nnonsense\n", b"\xff\xfe", b"a:1\na:1\n", b"#" * 200_000):
                path.write_bytes(wrong)
                assert not members.refresh(SECONDS)
                assert members.nodes == ("a:7420", "b:7420")
            path.unlink()
            assert not members.refresh(SECONDS)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            assert "the last 2 known stay" in caplog.text
            path.write_text("c:7420\n")
            assert members.refresh(SECONDS)
        assert members.nodes == ("c:7420",)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    @pytest.mark.parametrize("content", [None, "", "a:7420\nwhat\n"])
    def test_a_file_that_is_wrong_at_start_is_refused(self, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "nodes"
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError, match=str(path)) as error:
            Members(f"file:{path}")
        assert content != "a:7420\nwhat\n" or f"{path}:2" in str(error.value)


class TestDns:
    @pytest.fixture
    def resolver(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
        resolver = Resolver()
        monkeypatch.setattr(socket, "getaddrinfo", resolver)
        yield resolver
        resolver.go_on.set()

    def test_every_address_of_the_name_is_a_node(self, resolver: Resolver) -> None:
        resolver.hosts = ["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"]
        members = Members("dns:store.kv.svc:7420")
        assert members.is_live
        assert members.nodes == ()
        assert members.refresh(SECONDS)
        assert members.nodes == ("10.0.0.1:7420", "10.0.0.2:7420", "[fd00::1]:7420")
        assert resolver.asked == [("store.kv.svc", 7420)]

    def test_a_new_address_is_seen_and_a_failing_name_keeps_the_last(
        self, resolver: Resolver, caplog: pytest.LogCaptureFixture
    ) -> None:
        resolver.hosts = ["10.0.0.1"]
        members = Members("dns:store:7420")
        assert members.refresh(SECONDS)
        resolver.error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        for _ in range(3):
            assert not members.refresh(SECONDS)
        assert members.nodes == ("10.0.0.1:7420",)
        assert caplog.text.count("cannot be told") == 1
        resolver.error = None
        resolver.hosts = ["10.0.0.1", "10.0.0.3"]
        assert members.refresh(SECONDS)
        assert members.nodes == ("10.0.0.1:7420", "10.0.0.3:7420")

    def test_a_name_server_that_does_not_answer_holds_up_one_thread_and_no_one_else(self, resolver: Resolver) -> None:
        resolver.hosts = ["10.0.0.1"]
        resolver.go_on.clear()
        members = Members("dns:store:7420")
        threads = threading.active_count()
        for _ in range(5):
            assert not members.refresh(0.01)
        assert threading.active_count() <= threads + 1
        assert len(resolver.asked) == 1
        resolver.go_on.set()
        assert members.refresh(SECONDS)
        assert members.nodes == ("10.0.0.1:7420",)

    def test_too_many_addresses_and_none_keep_the_last(self, resolver: Resolver) -> None:
        resolver.hosts = ["10.0.0.1"]
        members = Members("dns:store:7420")
        assert members.refresh(SECONDS)
        for hosts in ([], [f"10.0.{number // 250}.{number % 250}" for number in range(MAX_NODES + 1)]):
            resolver.hosts = hosts
            assert not members.refresh(SECONDS)
            assert members.nodes == ("10.0.0.1:7420",)


class Resolver:
    """Stands for getaddrinfo."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.error: OSError | None = None
        self.asked: list[tuple[str, int]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, host: str, port: int, **_settings: Any) -> list[tuple[Any, ...]]:
        self.asked.append((host, port))
        assert self.go_on.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port)) for found in self.hosts]
