"""Ports are taken before anything starts, and stay ours over the death of a child."""

from __future__ import annotations

import socket

import pytest

from kvhearth.control.ports import PortKeeper
from kvhearth.errors import UserError


def listener(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_a_child_can_listen_on_a_kept_port_again_and_again(ports: PortKeeper) -> None:
    port = ports.take("127.0.0.1", 0, where="router.listen")
    for _ in range(3):
        with listener(port), socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_kept_port_is_nobody_elses(ports: PortKeeper) -> None:
    kept = {ports.take("127.0.0.1", 0, where="x") for _ in range(50)}
    assert len(kept) == 50
    for port in kept:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_busy_port_is_named_with_the_field_that_asked_for_it(ports: PortKeeper) -> None:
    with listener(0) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=rf"^router\.listen: port {port} on 127\.0\.0\.1 is in use; .*another port"):
            ports.take("127.0.0.1", port, where="router.listen")


def test_an_address_of_another_machine_is_refused(ports: PortKeeper) -> None:
    with pytest.raises(
        UserError, match=r"^store\.listen: cannot listen at 192\.0\.2\.1:0: .*set an address of this machine"
    ):
        ports.take("192.0.2.1", 0, where="store.listen")


def test_ports_are_free_again_after_close() -> None:
    with PortKeeper() as keeper:
        port = keeper.take("127.0.0.1", 0, where="x")
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", port))
