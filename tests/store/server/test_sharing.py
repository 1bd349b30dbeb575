"""KV.ATTACH and what follows it, on a real server: who may, what is lent, and that nothing outlives its owner."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvhearth.store.client.mapping import Mapping
from kvhearth.store.client.outcomes import Miss
from kvhearth.store.client.wire import WireConnection, encode_command
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.grants import Grant, Refusal, pack_numbers, pack_sizes, unpack_grants
from kvhearth.store.protocol.packed import pack_keys
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.passwords import hash_password
from kvhearth.store.server.server import StoreServer

MIB = 2**20
SECONDS = 10.0


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up, "it did not come to pass"
        time.sleep(0.005)


class Raw:
    """Asks a server in its own commands."""

    def __init__(self, address: str) -> None:
        self.wire = WireConnection(parse_address(address), self.deadline)
        self.mapping: Mapping | None = None

    @property
    def deadline(self) -> float:
        return time.monotonic() + SECONDS

    def attach(self) -> Raw:
        self.wire.send([encode_command(b"KV.ATTACH")], self.deadline)
        nbytes, fd = self.wire.integer_with_descriptor(self.deadline)
        assert fd is not None
        self.mapping = Mapping(fd, nbytes)
        os.close(fd)
        return self

    def ask(self, *command: bytes) -> bytes:
        """The answer: of a bulk its bytes, else its line."""
        self.wire.send([encode_command(*command)], self.deadline)
        line = self.wire.line(self.deadline)
        if not line.startswith(b"$"):
            return line
        raw = bytearray(int(line[1:]))
        self.wire.read_into([memoryview(raw)], self.deadline)
        self.wire.crlf(self.deadline)
        return bytes(raw)

    def grants(self, *command: bytes, count: int) -> list[Grant]:
        assert self.mapping is not None
        return unpack_grants(self.ask(*command), count, self.mapping.nbytes)

    def read(self, grant: Grant) -> bytes:
        assert self.mapping is not None
        row = bytearray(grant.nbytes)
        self.mapping.copy_out(grant.pieces, [memoryview(row)])
        return bytes(row)

    def put(self, key: bytes, value: bytes) -> None:
        assert self.mapping is not None
        (grant,) = self.grants(b"KV.RESERVE", pack_sizes([len(value)]), key, count=1)
        self.mapping.copy_in([memoryview(value)], grant.pieces)
        assert self.ask(b"KV.COMMIT", pack_numbers([grant.number])) == b"s"

    def close(self) -> None:
        self.wire.close()


@pytest.fixture
def shared(start_store: Callable[..., StoreServer], tmp_path: Path) -> StoreServer:
    return start_store(unix=tmp_path / "s", listen="127.0.0.1:0")


@pytest.fixture
def dial() -> Iterator[Callable[[StoreServer], Raw]]:
    made: list[Raw] = []

    def connect(server: StoreServer) -> Raw:
        made.append(Raw(unix_of(server)))
        return made[-1]

    yield connect
    for raw in made:
        raw.close()


def unix_of(server: StoreServer) -> str:
    return next(str(address) for address in server.addresses if address.is_unix)


Dial = Callable[[StoreServer], Raw]


class TestCopies:
    def test_a_value_copied_in_is_read_by_lease_and_by_get(self, shared: StoreServer, dial: Dial) -> None:
        raw, value = dial(shared).attach(), os.urandom(200_000)
        raw.put(b"k", value)
        (grant,) = raw.grants(b"KV.LEASE", b"k", count=1)
        assert raw.read(grant) == value
        assert raw.ask(b"KV.RELEASE", pack_numbers([grant.number])) == b":1"
        assert raw.ask(b"GET", b"k") == value

    def test_many_keys_travel_packed_and_are_answered_in_order(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared).attach()
        keys = [b"key-%03d" % number for number in range(64)]
        packed = pack_keys(keys)
        assert packed is not None
        grants = raw.grants(b"KV.RESERVE", pack_sizes(range(1, 65)), packed, count=64)
        assert [grant.nbytes for grant in grants] == list(range(1, 65))
        assert raw.ask(b"KV.COMMIT", pack_numbers([grant.number for grant in grants[::2]])) == b"s" * 32
        assert raw.ask(b"KV.ABANDON", pack_numbers([grant.number for grant in grants[1::2]])) == b":32"
        found = raw.grants(b"KV.LEASE", packed, count=64)
        assert [grant.nbytes for grant in found] == [n if n % 2 else 0 for n in range(1, 65)]
        assert {grant.refusal for grant in found[1::2]} == {Refusal.ABSENT}
        assert shared.store.table.stats().uploading_bytes == 0

    def test_a_value_in_many_pieces(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared).attach()
        for number in range(1000):
            raw.ask(b"SET", b"%d" % number, bytes(8000))
        raw.ask(b"DEL", *[b"%d" % number for number in range(0, 1000, 2)])
        value = os.urandom(500_000)
        raw.put(b"k", value)
        (grant,) = raw.grants(b"KV.LEASE", b"k", count=1)
        assert len(grant.pieces) > 10
        assert raw.read(grant) == value

    def test_puts_and_leases_are_told_and_counted_as_any(self, shared: StoreServer, dial: Dial) -> None:
        raw, events = dial(shared).attach(), shared.store.table.events
        before = events.last
        raw.put(b"k", b"value")
        raw.grants(b"KV.LEASE", b"k", b"nothing", count=2)
        assert events.last == before + 1
        info = raw.ask(b"INFO")
        assert b"keyspace_hits:1\r\n" in info
        assert b"keyspace_misses:1\r\n" in info

    def test_what_is_too_large_or_no_key_is_refused_in_its_place(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared).attach()
        keys = [b"a", b"k" * 513, b"c"]
        grants = raw.grants(b"KV.RESERVE", pack_sizes([5 * MIB, 1, 1]), *keys, count=3)
        assert [grant.refusal for grant in grants] == [Refusal.TOO_LARGE, Refusal.BAD_KEY, None]

    def test_quotas_hold(self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial) -> None:
        raw = dial(start_store(unix=tmp_path / "s", namespace_quota_bytes=1000)).attach()
        (grant,) = raw.grants(b"KV.RESERVE", pack_sizes([2000]), b"ns:k", count=1)
        assert raw.ask(b"KV.COMMIT", pack_numbers([grant.number])) == b"q"
        assert raw.ask(b"EXISTS", b"ns:k") == b":0"

    def test_a_leased_value_is_overwritten_and_evicted_beside_the_reader(self, shared: StoreServer, dial: Dial) -> None:
        raw, other, value = dial(shared).attach(), dial(shared), os.urandom(300_000)
        raw.put(b"k", value)
        (grant,) = raw.grants(b"KV.LEASE", b"k", count=1)
        assert b'"lent_bytes":300000' in other.ask(b"KV.STATS")
        other.ask(b"SET", b"k", b"new")
        for number in range(60):
            other.ask(b"SET", b"%d" % number, bytes(300_000))
        assert raw.read(grant) == value
        assert raw.ask(b"KV.RELEASE", pack_numbers([grant.number])) == b":1"


class TestWhoMay:
    def refused(self, raw: Raw) -> bytes:
        line = raw.ask(b"KV.ATTACH")
        assert line.startswith(b"-ERR ")
        assert raw.ask(b"KV.LEASE", b"team-a").startswith(b"-ERR this connection has not attached")
        return line

    def test_nobody_over_tcp(self, shared: StoreServer) -> None:
        raw = Raw(next(str(address) for address in shared.addresses if not address.is_unix))
        assert b"over a unix socket only" in self.refused(raw)
        raw.close()

    def test_nobody_where_it_is_switched_off(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        raw = dial(start_store(unix=tmp_path / "s", shared_memory=False))
        assert b"does not share its memory" in self.refused(raw)

    def test_nobody_of_another_user(self, shared: StoreServer, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: real + 1)
        assert b"the store's own user" in self.refused(dial(shared))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_a_process_of_another_user_that_got_at_the_socket(self, start_store: Callable[..., StoreServer]) -> None:
        folder = Path(tempfile.mkdtemp(prefix="kvhearth-test-"))
        try:
            folder.chmod(0o755)
            path = folder / "s"
            start_store(unix=path)
            path.chmod(0o666)
            answer = self.ask_as_nobody(path)
        finally:
            shutil.rmtree(folder)
        assert b"-ERR memory is shared with the store's own user 0 only, not with 65534" in answer

    def ask_as_nobody(self, path: Path) -> bytes:
        script = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
            "s.sendall(b'*1\\r\\n$9\\r\\nKV.ATTACH\\r\\n'); data, fds, _, _ = socket.recv_fds(s, 1000, 1)\n"
            "assert not fds; print(data.decode())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test_of_several_users_those_who_may_do_everything(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        users = tmp_path / "users"
        line = hash_password(b"secret").phc()
        rights = {"all": "read,write,admin:", "some": "read,write:", "part": "read,write:team-a"}
        users.write_text("".join(f"{name}:{line}:{what}\n" for name, what in rights.items()))
        users.chmod(0o600)
        server = start_store(unix=tmp_path / "s", users_file=users)
        for name in rights:
            raw = dial(server)
            assert raw.ask(b"KV.ATTACH").startswith(b"-NOAUTH")
            assert raw.ask(b"AUTH", name.encode(), b"secret") == b"+OK"
            if name == "all":
                raw.attach().put(b"k", b"value")
            else:
                assert b"every right and every key" in self.refused(raw)

    def test_what_was_not_lent_is_nobodys(self, shared: StoreServer, dial: Dial) -> None:
        raw, thief = dial(shared).attach(), dial(shared).attach()
        (grant,) = raw.grants(b"KV.RESERVE", pack_sizes([1000]), b"k", count=1)
        numbers = pack_numbers([grant.number, 77])
        assert thief.ask(b"KV.COMMIT", numbers) == b"??"
        assert thief.ask(b"KV.ABANDON", numbers) == b":0"
        assert thief.ask(b"KV.RELEASE", numbers) == b":0"
        assert raw.ask(b"KV.COMMIT", numbers) == b"s?"

    def test_wrong_requests_say_what_is_wrong(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared).attach()
        assert b"2 sizes for 1 keys" in raw.ask(b"KV.RESERVE", pack_sizes([1, 2]), b"k")
        assert b"3 bytes are not" in raw.ask(b"KV.RESERVE", b"abc", b"k")
        assert b"3 bytes are not" in raw.ask(b"KV.COMMIT", b"abc")
        assert b"wrong number of arguments" in raw.ask(b"KV.RELEASE")


OWNER = """
import os, sys, time
from kvhearth.store.protocol.address import parse_address
from kvhearth.store.protocol.grants import pack_sizes, unpack_grants
from kvhearth.store.client.mapping import Mapping
from kvhearth.store.client.wire import WireConnection, encode_command
end = time.monotonic() + 20
wire = WireConnection(parse_address(sys.argv[1]), end)
wire.send([encode_command(b"KV.ATTACH")], end)
nbytes, fd = wire.integer_with_descriptor(end)
mapping = Mapping(fd, nbytes)
def grants(*command):
    wire.send([encode_command(*command)], end)
    raw = bytearray(wire.bulk_length(end))
    wire.read_into([memoryview(raw)], end); wire.crlf(end)
    return unpack_grants(bytes(raw), 2, nbytes)
grants(b"KV.LEASE", b"held", b"held")
half, none = grants(b"KV.RESERVE", pack_sizes([200_000, 200_000]), b"half", b"none")
mapping.copy_in([memoryview(b"x" * 100_000)], half.pieces)
print("ready", flush=True)
time.sleep(60)
"""


class TestOwnersThatGo:
    """Case: pinned or leased chunks whose owner died are released; a put that failed half way is never visible."""

    def test_a_killed_client_leaves_nothing_held_and_nothing_half_written(
        self, shared: StoreServer, dial: Dial
    ) -> None:
        raw, table = dial(shared), shared.store.table
        raw.ask(b"SET", b"held", bytes(300_000))
        with subprocess.Popen([sys.executable, "-c", OWNER, unix_of(shared)], stdout=subprocess.PIPE) as owner:
            try:
                assert owner.stdout is not None
                assert owner.stdout.readline() == b"ready\n"
                assert shared.store.lent.taken_bytes == 1_000_000
                assert table.stats().uploading_bytes >= 400_000
                raw.ask(b"DEL", b"held")
                assert table.stats().used_bytes >= 700_000
            finally:
                owner.send_signal(signal.SIGKILL)
        until(lambda: table.stats().used_bytes == 0)
        assert shared.store.lent.taken_bytes == 0
        assert raw.ask(b"EXISTS", b"half", b"none", b"held") == b":0"

    def test_what_is_held_ends_when_the_connection_does(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared).attach()
        raw.grants(b"KV.RESERVE", pack_sizes([1000]), b"k", count=1)
        raw.close()
        until(lambda: shared.store.table.stats().uploading_bytes == 0)

    def test_who_holds_on_for_too_long_is_cut_off_however_busy(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        server = start_store(unix=tmp_path / "s", stall_timeout_seconds=0.3)
        raw = dial(server).attach()
        raw.put(b"k", b"value")
        raw.grants(b"KV.LEASE", b"k", count=1)

        def is_cut() -> bool:
            try:
                return raw.ask(b"PING") != b"+PONG"
            except Miss:
                return True

        until(is_cut)
        until(lambda: server.store.lent.taken_bytes == 0)
        assert dial(server).ask(b"GET", b"k") == b"value"

    def test_a_client_that_holds_nothing_is_not_cut_off(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        raw = dial(start_store(unix=tmp_path / "s", stall_timeout_seconds=0.1)).attach()
        raw.put(b"k", b"value")
        time.sleep(0.4)
        assert raw.ask(b"PING") == b"+PONG"

    def test_a_server_that_stops_takes_its_memory_along_and_not_the_clients_mapping(
        self, start_store: Callable[..., StoreServer], tmp_path: Path, dial: Dial
    ) -> None:
        server = start_store(unix=tmp_path / "s")
        raw = dial(server).attach()
        raw.put(b"k", b"value")
        (grant,) = raw.grants(b"KV.LEASE", b"k", count=1)
        server.stop()
        assert raw.read(grant) == b"value"

    def test_the_memory_cannot_be_pulled_from_under_the_server(self, shared: StoreServer, dial: Dial) -> None:
        raw = dial(shared)
        raw.wire.send([encode_command(b"KV.ATTACH")], raw.deadline)
        nbytes, fd = raw.wire.integer_with_descriptor(raw.deadline)
        assert fd is not None
        try:
            for length in (0, nbytes + 1):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, length)
        finally:
            os.close(fd)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[StoreServer]:
    with tempfile.TemporaryDirectory() as folder:
        server = StoreServer(StoreConfig(capacity_bytes=MIB, listen=None, unix=Path(folder) / "s")).start()
        yield server
        server.stop()


numbers = st.one_of(st.lists(st.integers(0, 20), max_size=10).map(pack_numbers), st.binary(max_size=40))
sizes = st.one_of(
    st.lists(st.one_of(st.integers(0, 300_000), st.integers(0, 2**64 - 1)), max_size=4).map(pack_sizes),
    st.binary(max_size=40),
)
some_keys = st.lists(st.one_of(st.sampled_from([b"a", b"b", b"c"]), st.binary(max_size=20)), min_size=1, max_size=4)
packed_keys = st.one_of(some_keys, st.binary(max_size=40).map(lambda raw: [b"\x00KVK" + raw]))
requests = st.one_of(
    st.tuples(st.sampled_from([b"KV.RELEASE", b"KV.COMMIT", b"KV.ABANDON"]), numbers).map(list),
    packed_keys.map(lambda found: [b"KV.LEASE", *found]),
    st.tuples(sizes, packed_keys).map(lambda both: [b"KV.RESERVE", both[0], *both[1]]),
)


@given(st.lists(requests, max_size=15))
def test_any_requests_leave_a_server_that_answers_and_holds_nothing_when_they_are_over(
    fuzzed: StoreServer, commands: list[list[bytes]]
) -> None:
    raw = Raw(unix_of(fuzzed)).attach()
    for command in commands:
        assert not raw.ask(*command).startswith(b"-ERR Protocol")
    assert raw.ask(b"PING") == b"+PONG"
    assert fuzzed.store.lent.taken_bytes <= MIB // 2
    raw.close()
    until(lambda: fuzzed.store.lent.taken_bytes == 0 and fuzzed.store.table.stats().uploading_bytes == 0)


def test_a_reader_that_is_not_told_about_descriptors_is_answered_all_the_same(shared: StoreServer) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.settimeout(SECONDS)
        sock.connect(unix_of(shared).removeprefix("unix:"))
        sock.sendall(encode_command(b"KV.ATTACH") + encode_command(b"PING"))
        answer = b""
        while not answer.endswith(b"+PONG\r\n"):
            answer += sock.recv(100)
        assert answer == b":%d\r\n+PONG\r\n" % shared.store.table.pool.nbytes
