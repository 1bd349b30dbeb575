"""TLS: real handshakes on real sockets, with certificates good and bad."""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
import trustme

from kvhearth.errors import UserError
from kvhearth.metrics import parse_exposition
from kvhearth.store.client.client import StoreClient
from kvhearth.store.protocol import tls
from kvhearth.store.protocol.header import Header
from kvhearth.store.protocol.tls import ClientTls, ServerTls, TlsSettings
from kvhearth.store.protocol.tls_socket import TlsError, TlsSocket
from kvhearth.store.server.server import StoreServer

SECONDS = 10.0
ROW = os.urandom(3 * 2**20 + 17)


class Files(NamedTuple):
    """An authority and a certificate of its for 127.0.0.1, on disk."""

    authority: trustme.CA
    ca: Path
    certificate: Path
    key: Path

    def reissue(self, *names: str, authority: trustme.CA | None = None, **more: Any) -> None:
        """Put another certificate and key in place."""
        leaf = (authority or self.authority).issue_cert(*(names or ("127.0.0.1",)), **more)
        leaf.private_key_pem.write_to_path(str(self.key))
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))

    @property
    def server(self) -> TlsSettings:
        return TlsSettings(certificate=self.certificate, key=self.key)

    @property
    def client(self) -> TlsSettings:
        return TlsSettings(ca=self.ca)

    @property
    def store(self) -> dict[str, Any]:
        """Settings of a store with them."""
        return {"tls_certificate": self.certificate, "tls_key": self.key}


@pytest.fixture(scope="session")
def authorities() -> tuple[trustme.CA, trustme.CA]:
    return trustme.CA(), trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authorities: tuple[trustme.CA, trustme.CA]) -> Files:
    made = Files(authorities[0], tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem")
    authorities[0].cert_pem.write_to_path(str(made.ca))
    made.reissue()
    return made


@pytest.fixture(autouse=True)
def look_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_LOOK_AGAIN_SECONDS", 0.0)


@contextmanager
def connected(files: Files, serve: Callable[[TlsSocket], None]) -> Iterator[TlsSocket]:
    """The client's end of a TLS connection to a server that runs ``serve``."""
    server, faults = ServerTls(files.server), list[BaseException]()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            try:
                with closing(server.wrap(listener.accept()[0], time.monotonic() + SECONDS)) as sock:
                    serve(sock)
            except BaseException as fault:
                faults.append(fault)

        thread = threading.Thread(target=accept)
        thread.start()
        plain = socket.create_connection(listener.getsockname(), SECONDS)
        sock = ClientTls(files.client).wrap(plain, time.monotonic() + SECONDS, host="127.0.0.1")
        try:
            yield sock
        finally:
            sock.close()
            thread.join(SECONDS)
    assert not thread.is_alive()
    assert not faults


def client_of(store: StoreServer, settings: TlsSettings | None, **more: Any) -> closing[StoreClient]:
    return closing(StoreClient(store.address, tls=settings, **{"timeout_seconds": SECONDS, **more}))


def why_not(store: StoreServer, settings: TlsSettings, host: str = "127.0.0.1") -> str:
    """What an operator is told when a client cannot connect."""
    plain = socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS)
    try:
        with closing(ClientTls(settings).wrap(plain, time.monotonic() + SECONDS, host=host)) as sock:
            sock.sendall(b"PING\r\n")  # with TLS 1.3 a client learns so late that its certificate was refused
            while sock.recv(100):
                pass
    except TlsError as refused:
        return str(refused.strerror)
    return "let in, or cut without a word"


def test_rows_go_through_whole(start_store: Callable[..., StoreServer], files: Files) -> None:
    store = start_store(**files.store, capacity_bytes=16 * 2**20)
    buffer = bytearray(len(ROW))
    with client_of(store, files.client) as client:
        for number in range(4):
            assert client.put(b"k%d" % number, Header(), ROW).stored
        assert client.match([b"k0", b"k1", b"x"]) == 2
        assert client.get_into(b"k3", buffer).hit
    assert buffer == ROW


def test_redis_py_over_tls(start_store: Callable[..., StoreServer], files: Files) -> None:
    store = start_store(**files.store)
    with redis.Redis(
        port=store.addresses[0].port, host="127.0.0.1", ssl=True, ssl_ca_certs=str(files.ca), socket_timeout=SECONDS
    ) as client:
        client.set("k", ROW[:100_000])
        assert client.get("k") == ROW[:100_000]


def test_a_unix_socket_needs_none(start_store: Callable[..., StoreServer], files: Files, tmp_path: Path) -> None:
    start_store(**files.store, unix=tmp_path / "s")
    for settings in (None, files.client):
        with closing(StoreClient(f"unix:{tmp_path / 's'}", tls=settings, timeout_seconds=SECONDS)) as client:
            assert client.ping() is None


def test_a_client_that_never_finishes_the_handshake_is_cut(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    store = start_store(**files.store, stall_timeout_seconds=0.3)
    address = ("127.0.0.1", store.addresses[0].port)
    with socket.create_connection(address, SECONDS) as silent, socket.create_connection(address, SECONDS) as half:
        half.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
        with client_of(store, files.client) as client:
            assert client.ping() is None
        for sock in (silent, half):
            sock.settimeout(SECONDS)
            assert sock.recv(100) == b""


def test_one_that_sends_its_handshake_byte_by_byte_is_cut(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    store = start_store(**files.store, stall_timeout_seconds=0.3)
    with socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS) as slow:
        assert drip(slow, b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(2**14)) == "cut"


def drip(sock: socket.socket, data: bytes) -> str:
    """Send byte by byte until the other side has had enough."""
    give_up = time.monotonic() + SECONDS
    for byte in data:
        try:
            sock.sendall(bytes([byte]))
        except ConnectionError:
            return "cut"
        if time.monotonic() > give_up:
            break
        time.sleep(0.01)
    return "suffered"


def test_plain_clients_are_turned_away_and_the_store_goes_on(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    store = start_store(**files.store)
    for said in (b"*1\r\n$4\r\nPING\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100):
        with socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS) as plain:
            plain.sendall(said)
            answer = plain.recv(100)  # at most TLS's alert
            assert b"PONG" not in answer
    with client_of(store, None) as client:
        assert client.ping() is not None
    with client_of(store, files.client) as client:
        assert client.ping() is None


def test_tls_to_a_plain_store_is_a_miss(start_store: Callable[..., StoreServer], files: Files) -> None:
    with client_of(start_store(), files.client) as client:
        reason = client.ping()
    assert reason is not None
    assert reason.value == "unreachable"


def test_an_expired_certificate_is_refused_by_that_name(start_store: Callable[..., StoreServer], files: Files) -> None:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    files.reissue(not_before=past - datetime.timedelta(days=9), not_after=past)
    assert "certificate has expired" in why_not(start_store(**files.store), files.client)


def test_another_authority_is_refused_by_that_name(
    start_store: Callable[..., StoreServer], files: Files, authorities: tuple[trustme.CA, trustme.CA], tmp_path: Path
) -> None:
    authorities[1].cert_pem.write_to_path(str(tmp_path / "other.pem"))
    store = start_store(**files.store)
    said = why_not(store, TlsSettings(ca=tmp_path / "other.pem"))
    assert "certificate: unable to get local issuer certificate" in said
    assert "certificate" in why_not(store, TlsSettings())  # nor does the system know it


def test_a_certificate_for_another_name_is_refused_unless_that_name_is_expected(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    files.reissue("store.example")
    store = start_store(**files.store)
    assert "not valid for '127.0.0.1'" in why_not(store, files.client)
    with client_of(store, TlsSettings(ca=files.ca, server_name="store.example")) as client:
        assert client.ping() is None


def test_old_versions_of_tls_are_refused(start_store: Callable[..., StoreServer], files: Files) -> None:
    store = start_store(**files.store)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLS"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain)


class TestWithCertificatesOfClients:
    def settings(self, files: Files, authority: trustme.CA, folder: Path) -> TlsSettings:
        leaf = authority.issue_cert("engine")
        leaf.private_key_pem.write_to_path(str(folder / "client.key"))
        leaf.cert_chain_pems[0].write_to_path(str(folder / "client.pem"))
        return TlsSettings(ca=files.ca, certificate=folder / "client.pem", key=folder / "client.key")

    def test_one_of_the_right_authority_gets_in(
        self, start_store: Callable[..., StoreServer], files: Files, tmp_path: Path
    ) -> None:
        store = start_store(**files.store, tls_client_ca=files.ca)
        with client_of(store, self.settings(files, files.authority, tmp_path)) as client:
            assert client.ping() is None

    def test_none_and_a_wrong_one_are_told_why_they_do_not(
        self,
        start_store: Callable[..., StoreServer],
        files: Files,
        authorities: tuple[trustme.CA, trustme.CA],
        tmp_path: Path,
    ) -> None:
        store = start_store(**files.store, tls_client_ca=files.ca)
        assert "certificate required" in why_not(store, files.client)
        assert "unknown ca" in why_not(store, self.settings(files, authorities[1], tmp_path))
        with client_of(store, files.client) as client:
            assert client.ping() is not None


def serial(store: StoreServer, files: Files) -> int:
    """Number of the certificate that the store shows."""
    context = ssl.create_default_context(cafile=files.ca)
    with (
        socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        return int(sock.getpeercert()["serialNumber"], 16)  # type: ignore[index,arg-type]


def test_a_renewed_certificate_is_shown_to_new_connections_without_a_restart(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    store = start_store(**files.store)
    with client_of(store, files.client) as client:
        assert client.ping() is None
        before = serial(store, files)
        files.reissue()
        assert serial(store, files) != before
        assert client.ping() is None  # connections from before go on


def test_a_broken_renewal_leaves_the_last_good_certificate_and_says_so_once(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    server = ServerTls(files.server)
    good = server._files.context()
    files.certificate.write_text("nonsense")
    for _ in range(3):
        assert server._files.context() is good
    assert server.is_stale
    assert next(iter(server.metrics())).samples == [((), 1.0)]
    files.certificate.unlink()
    assert server._files.context() is good
    files.reissue()
    assert server._files.context() is not good
    assert not server.is_stale
    assert caplog.text.count("the last good ones stay") == 2


def test_a_client_takes_a_new_authority_without_a_restart(
    start_store: Callable[..., StoreServer], files: Files, authorities: tuple[trustme.CA, trustme.CA]
) -> None:
    store = start_store(**files.store)
    side = ClientTls(files.client)

    def connect() -> None:
        plain = socket.create_connection(("127.0.0.1", store.addresses[0].port), SECONDS)
        side.wrap(plain, time.monotonic() + SECONDS, host="127.0.0.1").close()

    connect()
    files.reissue(authority=authorities[1])
    with pytest.raises(TlsError):
        connect()
    authorities[1].cert_pem.write_to_path(str(files.ca))
    connect()


class TestFilesThatCannotBeUsed:
    def refusal(self, settings: TlsSettings) -> str:
        with pytest.raises(UserError) as refused:
            ServerTls(settings)
        return str(refused.value)

    def test_are_named_with_the_remedy(self, files: Files, tmp_path: Path) -> None:
        none = tmp_path / "none"
        assert "tls_certificate: cannot read " in self.refusal(TlsSettings(certificate=none, key=files.key))
        assert "tls_key: cannot read " in self.refusal(TlsSettings(certificate=files.certificate, key=none))
        assert "tls_client_ca: cannot use " in self.refusal(files.server.__class__(none, files.certificate, files.key))
        assert "no PEM certificates in it" in self.refusal(TlsSettings(files.key, files.certificate, files.key))
        assert "not a PEM certificate and key" in self.refusal(TlsSettings(certificate=files.key, key=files.key))
        assert "a server needs a certificate" in self.refusal(TlsSettings())
        with pytest.raises(UserError, match="tls_key: a certificate and its key go together"):
            TlsSettings(certificate=files.certificate)

    def test_a_key_of_another_certificate(self, files: Files) -> None:
        files.authority.issue_cert("x").private_key_pem.write_to_path(str(files.key))
        assert f"{files.key} is not the key of {files.certificate}" in self.refusal(files.server)

    def test_an_encrypted_key_asks_nobody(self, files: Files) -> None:
        from cryptography.hazmat.primitives import serialization as form

        key = form.load_pem_private_key(files.key.read_bytes(), None)
        secret = form.BestAvailableEncryption(b"hunter2")
        files.key.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret))
        assert "tls_key: the key is encrypted; store it decrypted" in self.refusal(files.server)


# The socket itself, beside a plain one.


def limit(sock: TlsSocket, seconds: float) -> None:
    import struct

    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def test_waitall_fills_every_buffer_over_many_records(files: Files) -> None:
    pieces = [ROW[:1], b"", ROW[1:5000], ROW[5000:40_000], ROW[40_000:]]
    with connected(files, lambda sock: sock.sendall(ROW)) as client:
        buffers = [bytearray(len(piece)) for piece in pieces]
        received = client.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
    assert received == len(ROW)
    assert buffers == pieces


def test_gathered_pieces_arrive_in_order(files: Files) -> None:
    got = bytearray()

    def serve(sock: TlsSocket) -> None:
        while data := sock.recv(100_000):
            got.extend(data)

    pieces = [ROW[:10], b"", ROW[10:20], ROW[20:20_000], ROW[20_000:20_001], ROW[20_001:]]
    with connected(files, serve) as client:
        assert client.sendmsg(pieces) == len(ROW)
        assert client.send(b"end") == 3
    assert got == ROW + b"end"


def test_a_time_limit_ends_a_receive_as_on_a_plain_socket(files: Files) -> None:
    over = threading.Event()

    def serve(sock: TlsSocket) -> None:
        sock.sendall(b"half")
        over.wait(SECONDS)

    with connected(files, serve) as client:
        limit(client, 0.2)
        buffer = bytearray(8)
        assert client.recv_into(buffer, 0, socket.MSG_WAITALL) == 4  # what came is not lost
        with pytest.raises(BlockingIOError) as timed_out:
            client.recv_into(buffer)
        assert timed_out.value.errno == errno.EAGAIN
        limit(client, SECONDS)
        over.set()
        assert client.recv(8) == b""  # and the connection can go on


def test_a_sender_that_drips_does_not_stretch_the_limit(files: Files) -> None:
    over = threading.Event()

    def serve(sock: TlsSocket) -> None:
        while not over.wait(0.02):
            sock.send(b".")

    with connected(files, serve) as client:
        limit(client, 0.3)
        received = client.recv_into(bytearray(2**20), 0, socket.MSG_WAITALL)
        over.set()
    assert 0 < received < 2**20


def test_what_did_not_go_out_in_time_can_be_sent_again(files: Files) -> None:
    start, got = threading.Event(), bytearray()

    def serve(sock: TlsSocket) -> None:
        start.wait(SECONDS)
        while len(got) < len(data) and (more := sock.recv(2**20)):
            got.extend(more)

    data = ROW * 8
    with connected(files, serve) as client:
        limit(client, 0.1)
        left, stalls, give_up = memoryview(data), 0, time.monotonic() + SECONDS
        while left:
            assert time.monotonic() < give_up
            try:
                left = left[client.sendmsg([left[:700_000], left[700_000:]]) :]
            except BlockingIOError:
                stalls += 1
                if stalls == 2:
                    start.set()
    assert stalls >= 2
    assert got == data


def test_a_store_that_stalls_within_a_reply_is_a_timeout_within_the_deadline(
    files: Files, fake_store: Callable[..., Any]
) -> None:
    server = ServerTls(files.server)

    def script(sock: socket.socket) -> None:
        with closing(server.wrap(sock, time.monotonic() + SECONDS)) as secure:
            secure.recv(1000)
            secure.sendall(b"$1000\r\nabc")
            secure.recv(1000)  # until the client leaves

    fake = fake_store(script)
    with closing(StoreClient(fake.address, tls=files.client, timeout_seconds=0.4)) as client:
        result = client.get_into(b"k", bytearray(1000))
    assert result.reason is not None
    assert result.reason.value == "timeout"


def test_a_shutdown_from_another_thread_wakes_a_receive(files: Files) -> None:
    over = threading.Event()
    with connected(files, lambda _sock: over.wait(SECONDS) and None) as client:
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(client.recv(10)))
        thread.start()
        client.shutdown(socket.SHUT_RDWR)
        thread.join(SECONDS)
        over.set()
    assert not thread.is_alive()
    assert got == [b""]


def test_it_tells_who_it_talks_to(files: Files) -> None:
    with connected(files, lambda sock: sock.recv(1) and None) as client:
        assert client.family == socket.AF_INET
        assert client.getpeername()[0] == "127.0.0.1"
        assert client.fileno() > 0
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(TypeError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 1)


def test_events_and_commands_share_a_connection_under_tls(
    start_store: Callable[..., StoreServer], files: Files
) -> None:
    store = start_store(**files.store)
    with redis.Redis(
        port=store.addresses[0].port, host="127.0.0.1", ssl=True, ssl_ca_certs=str(files.ca), socket_timeout=SECONDS
    ) as client:
        subscriber = client.pubsub()
        subscriber.subscribe("kv.events")
        subscriber.ping()
        said = [subscriber.get_message(timeout=SECONDS) for _ in range(2)]
        subscriber.close()
    assert [message and message["type"] for message in said] == ["subscribe", "pong"]


def test_a_scrape_tells_of_a_broken_renewal(start_store: Callable[..., StoreServer], files: Files) -> None:
    store = start_store(**files.store)

    def stale() -> float:
        return parse_exposition(store.registry.expose().decode())["kvhearth_store_tls_stale"][()]

    assert stale() == 0
    files.key.write_text("nonsense")
    assert stale() == 1
    files.reissue()
    assert stale() == 0
