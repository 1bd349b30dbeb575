"""Addresses, and the socket files of unix sockets."""

from __future__ import annotations

import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.store.protocol.address import Address, Listener, connect, parse_address


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:7420", Address("127.0.0.1", 7420), True),
        ("localhost:1", Address("localhost", 1), True),
        ("[::1]:7420", Address("::1", 7420), True),
        ("0.0.0.0:7420", Address("0.0.0.0", 7420), False),
        ("[::]:7420", Address("::", 7420), False),
        ("store.example:7420", Address("store.example", 7420), False),
        ("unix:/run/s", Address(path="/run/s"), True),
    ],
)
def test_an_address_is_read_and_written_back(text: str, address: Address, loopback: bool) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert address.is_loopback == loopback


def test_a_bare_path_is_a_unix_socket() -> None:
    assert parse_address("/run/s") == Address(path="/run/s")


@pytest.mark.parametrize(
    "text", ["", "7420", "host", "host:", ":1", "::1:80", "h:65536", "http://h:1", "unix:", "a b:1"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"store: .*; "):
        parse_address(text, where="store")


def test_a_path_too_long_for_a_socket_is_named() -> None:
    with pytest.raises(UserError, match="1 to 99 bytes; choose a shorter path"):
        parse_address("unix:/" + "x" * 99)


def test_a_name_is_looked_up() -> None:
    listener = Listener(Address("localhost", 0), where="listen")
    listener.open()
    connect(Address("localhost", listener.address.port), 5.0).close()
    listener.close()


def test_a_name_that_nobody_has_is_an_os_error() -> None:
    with pytest.raises(OSError):
        connect(Address("nobody.invalid", 1), 5.0)


def test_a_name_server_that_does_not_answer_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [asked.wait(10.0)][1:])
    with pytest.raises(TimeoutError, match="looking up a-store timed out"):
        connect(Address("a-store", 1), 0.05)
    asked.set()


class TestUnixListener:
    def listener(self, path: Path) -> Listener:
        return Listener(Address(path=str(path)), where="unix")

    def test_only_its_owner_may_open_it(self, tmp_path: Path) -> None:
        listener = self.listener(tmp_path / "s")
        listener.open()
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
        listener.close()
        assert not os.listdir(tmp_path)

    def test_it_is_not_there_before_it_answers(self, tmp_path: Path) -> None:
        listener = self.listener(tmp_path / "s")
        assert not (tmp_path / "s").exists()
        listener.close()
        assert not os.listdir(tmp_path)

    def test_the_socket_of_a_dead_server_is_replaced(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        listener = self.listener(tmp_path / "s")
        listener.open()
        connect(listener.address, 1.0).close()
        listener.close()

    def test_the_socket_of_a_live_server_is_left_alone(self, tmp_path: Path) -> None:
        live = self.listener(tmp_path / "s")
        live.open()
        with pytest.raises(UserError, match=r"unix: .* is already in use; stop the process"):
            self.listener(tmp_path / "s")
        connect(live.address, 1.0).close()
        live.close()

    def test_a_file_that_is_no_socket_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("precious")
        with pytest.raises(UserError, match="is not a socket; choose another path"):
            self.listener(tmp_path / "s")
        assert (tmp_path / "s").read_text() == "precious"

    def test_a_folder_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="nowhere does not exist; create it first"):
            self.listener(tmp_path / "nowhere" / "s")

    def test_a_successors_socket_is_left_alone_when_closing(self, tmp_path: Path) -> None:
        first = self.listener(tmp_path / "s")
        first.open()
        (tmp_path / "s").unlink()
        second = self.listener(tmp_path / "s")
        second.open()
        first.close()
        connect(second.address, 1.0).close()
        second.close()
