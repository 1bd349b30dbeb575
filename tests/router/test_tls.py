"""HTTPS towards clients, whose certificate may be renewed while the router runs, and towards engines."""

from __future__ import annotations

import asyncio
import ssl

import httpx
import pytest
import trustme
from tests.router.conftest import RunningRouter

from kvhearth.errors import UserError
from kvhearth.router.config import HealthChecks, RouterConfig, Timeouts, Tls
from kvhearth.router.tls import ListenerTls, engines_tls

BODY = {"model": "m", "prompt": "hello"}


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def written(authority: trustme.CA, folder) -> Tls:
    cert = authority.issue_cert("localhost", "127.0.0.1")
    cert.private_key_pem.write_to_path(folder / "tls.key")
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    return Tls(folder / "tls.crt", folder / "tls.key")


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def test_a_client_is_served_over_https_and_by_a_renewed_certificate_without_a_restart(lab, tmp_path, authority):
    tls = written(authority, tmp_path)
    router = lab.router(lab.engine(), tls=tls)
    url = f"https://127.0.0.1:{router.port}/v1/completions"
    with httpx.Client(verify=trusting(authority)) as client:
        for _ in range(2):
            assert client.post(url, json=BODY).json() == {"ok": True}
    renewed = trustme.CA()
    written(renewed, tmp_path)

    def is_renewed() -> bool:
        try:
            return httpx.post(url, json=BODY, verify=trusting(renewed)).status_code == 200
        except httpx.ConnectError:
            return False

    lab.until(is_renewed, "the renewed certificate is in force")


def test_a_renewal_that_is_not_whole_leaves_the_old_certificate(tmp_path, authority):
    tls = written(authority, tmp_path)
    listener = ListenerTls(tls.cert_file, tls.key_file)
    assert not listener.refresh()
    key = tls.key_file.read_bytes()
    written(trustme.CA(), tmp_path)
    tls.key_file.write_bytes(key)
    with pytest.raises(UserError, match="cannot be used"):
        listener.refresh()
    assert not listener.refresh(), "said once"
    written(authority, tmp_path)
    assert listener.refresh()


@pytest.mark.parametrize("content", ["", "no certificate"])
def test_files_that_are_no_certificates_are_named(tmp_path, content):
    (tmp_path / "x").write_text(content)
    with pytest.raises(UserError, match=r"tls.cert_file: .*x and .*x cannot be used"):
        ListenerTls(tmp_path / "x", tmp_path / "x")
    if content:
        with pytest.raises(UserError, match=r"tls\.engine_ca_file"):
            engines_tls(Tls(engine_ca_file=tmp_path / "x"))


def test_an_engine_is_reached_over_https_and_one_of_another_authority_is_not(lab, tmp_path, authority):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                page = b'{"object":"list","data":[{"id":"m"}]}'
                if head.startswith(b"POST"):
                    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
                    await reader.readexactly(int(length.split(b":")[1]))
                    page = b'{"over":"https"}'
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def start() -> asyncio.Server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    server = lab.engines_loop.run(start())
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    statuses = []
    for number, trusted in enumerate((authority, trustme.CA())):
        file = tmp_path / f"ca{number}.pem"
        trusted.cert_pem.write_to_path(file)
        config = RouterConfig(
            engines=[("e0", url)],
            listen_port=0,
            policy="round-robin",
            tls=Tls(engine_ca_file=file),
            timeouts=Timeouts(drain_seconds=0.2, sweep_seconds=0.02),
            health=HealthChecks(interval_seconds=0.05),
        )
        router = RunningRouter(lab, config)
        lab.routers.append(router)
        wire = router.wire()
        wire.prompt()
        statuses.append(wire.response()[0])
    assert statuses == [200, 503]
    server.close()
