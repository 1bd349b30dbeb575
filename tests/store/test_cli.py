"""`kvhearth store` as a user runs it: real processes, signals and exit codes."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trustme

from kvhearth.cli.main import run
from kvhearth.store.client.admin import Admin
from kvhearth.store.client.client import Put, StoreClient
from kvhearth.store.protocol.header import HEADER_BYTES, Header
from kvhearth.store.server.server import StoreServer
from kvhearth.store.server.users import Users
from kvhearth.store.tiers.disk import DiskTier

SECONDS = 30.0
KVHEARTH = [sys.executable, "-c", "from kvhearth.cli.main import main; main()", "store"]


@contextmanager
def serving(*flags: str, password: str | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store process and the line it printed when it was ready."""
    env = {**os.environ, **({"KVHEARTH_STORE_PASSWORD": password} if password else {})}
    command = [*KVHEARTH, "serve", "--capacity", "8MiB", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def verb(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a verb in this process; gives what it prints on stdout."""

    def call(*args: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = run(["store", *args])
        printed = capsys.readouterr()
        assert ended == code, printed.err
        return printed.out if code == 0 else " ".join((printed.out + printed.err).split())

    return call


def test_serve_says_where_it_listens_answers_and_stops_cleanly(tmp_path: Path, verb: Callable[..., str]) -> None:
    path = tmp_path / "s"
    with serving("--listen", "127.0.0.1:0", "--unix", str(path), "--http-listen", "127.0.0.1:0") as (process, ready):
        pattern = r"kvhearth store ready: (127.0.0.1:\d+), unix:\S+/s, http://127.0.0.1:\d+/metrics, capacity 8 MiB\n"
        found = re.fullmatch(pattern, ready)
        assert found is not None, ready
        assert verb("ping", "--address", found[1]) == "PONG\n"
        assert "dram.capacity_bytes 8388608\n" in verb("stats", "--address", f"unix:{path}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
    assert not path.exists()


def test_a_password_in_the_environment_or_a_file_is_needed_and_enough(
    tmp_path: Path, verb: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVHEARTH_STORE_PASSWORD", raising=False)
    (tmp_path / "password").write_text("hunter2\n")
    with serving("--listen", "0.0.0.0:0", password="hunter2") as (process, ready):
        address = ["--address", f"127.0.0.1:{ready.partition('0.0.0.0:')[2].partition(',')[0]}"]
        assert "refuses: NOAUTH" in verb("ping", *address, code=2)
        assert verb("ping", *address, "--password-file", str(tmp_path / "password")) == "PONG\n"
        assert b"hunter2" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
        assert process.stderr is not None
        assert "hunter2" not in ready + process.stderr.read()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["serve", "--capacity", "lots"], "--capacity: 'lots' is not a size; write bytes"),
        (["serve", "--listen", "0.0.0.0:0"], "--listen: 0.0.0.0:0 can be reached from other machines and there is no"),
        (["serve", "--config", "/nowhere"], "--config: cannot read /nowhere"),
        (["serve", "--users-file", "/nowhere"], "users_file: cannot read /nowhere"),
        (["serve", "--password-file", "/nowhere"], "--password-file: cannot read /nowhere"),
        (["ping", "--address", "127.0.0.1:1"], "no answer from 127.0.0.1:1 (unreachable"),
        (["stats", "--address", "127.0.0.1:1"], "no answer from 127.0.0.1:1 (unreachable"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    verb: Callable[..., str], monkeypatch: pytest.MonkeyPatch, args: list[str], complaint: str
) -> None:
    monkeypatch.delenv("KVHEARTH_STORE_PASSWORD", raising=False)
    said = verb(*args, code=2)
    assert complaint in said
    assert "Traceback" not in said


def test_serve_takes_its_settings_from_a_file_and_the_environment_too(tmp_path: Path) -> None:
    (tmp_path / "store.yaml").write_text("listen: 127.0.0.1:0\ncapacity: 4MiB\nmax_connections: 7\n")
    env = {**os.environ, "KVHEARTH_STORE_MAX_VALUE": "1MiB"}
    command = [*KVHEARTH, "serve", "--config", str(tmp_path / "store.yaml"), "--capacity", "16MiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[3].rstrip(",")
        with_stats = StoreClient(address, timeout_seconds=SECONDS).stats()
        assert with_stats["maxmemory"] == str(16 * 2**20)
        assert with_stats["max_value_bytes"] == str(2**20)
        assert with_stats["maxclients"] == "7"
    finally:
        process.kill()
        process.communicate()


def filled(store: StoreServer) -> list[str]:
    """A store with two namespaces and a key without; the option that names the store."""
    rows = [(b"aa:%d" % n, b"x" * 1000) for n in range(5)] + [(b"bb:k", b"y" * 5000), (b"plain", b"z")]
    client = StoreClient(store.address, timeout_seconds=SECONDS)
    assert all(result.stored for result in client.put_many([Put(key, Header(), row) for key, row in rows]))
    client.close()
    return ["--address", store.address]


def test_stats_in_json_are_those_of_kv_stats(store: StoreServer, verb: Callable[..., str]) -> None:
    figures = json.loads(verb("stats", "--json", *filled(store)))
    assert figures["dram"]["items"] == 7
    assert "dram.items 7" in verb("stats", "--address", store.address)


def test_verbs_get_along_with_a_redis(redis_server_binary: str, verb: Callable[..., str], tmp_path: Path) -> None:
    command = [redis_server_binary, "--port", "0", "--unixsocket", str(tmp_path / "redis"), "--save", ""]
    redis_server = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path)
    try:
        give_up = time.monotonic() + SECONDS
        while not (tmp_path / "redis").exists():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        check_verbs_on_redis(verb, ["--address", f"unix:{tmp_path / 'redis'}"])
    finally:
        redis_server.kill()
        redis_server.wait()


def check_verbs_on_redis(verb: Callable[..., str], address: list[str]) -> None:
    assert "redis_version" in verb("stats", *address)
    client = StoreClient(address[1], timeout_seconds=SECONDS)
    assert client.put(b"aa:1", Header(), b"x").stored
    client.close()
    found = json.loads(verb("ls", "--json", *address))
    assert [(row["namespace"], row["chunks"]) for row in found["namespaces"]] == [("aa", 1)]
    assert verb("drop", "--namespace", "aa", "--yes", *address) == "dropped 1 chunk(s)\n"


def test_ls_shows_namespaces_by_size_and_the_tiers(store: StoreServer, verb: Callable[..., str]) -> None:
    address = filled(store)
    found = json.loads(verb("ls", "--json", *address))
    rows = {row["namespace"]: (row["chunks"], row["bytes"], row["dram_chunks"]) for row in found["namespaces"]}
    assert rows["bb"] == (1, 5000 + HEADER_BYTES, 1)
    assert rows["aa"] == (5, 5 * (1000 + HEADER_BYTES), 5)
    assert next(iter(rows)) == "aa"
    assert found["tiers"]["dram"]["chunks"] == 7
    page = verb("ls", *address)
    assert re.search(r"aa +5 +5.2 KiB +5 +5.2 KiB", page)
    assert re.search(r"dram +7 ", page)


def test_ls_counts_what_lies_below_memory(
    start_store: Callable[..., StoreServer], verb: Callable[..., str], tmp_path: Path
) -> None:
    store = start_store(disk=tmp_path / "disk", disk_capacity_bytes=2**30, write_mode="through")
    address, row = ["--address", store.address], os.urandom(2**20)
    give_up = time.monotonic() + SECONDS
    with closing(StoreClient(store.address, timeout_seconds=SECONDS)) as client, Admin(store.address) as admin:
        for number in range(20):  # more than the 8 MiB of memory
            assert client.put(b"aa:%d" % number, Header(), row).stored
            while admin.stats()["tiers"]["disk"]["items"] <= number:
                assert time.monotonic() < give_up
                time.sleep(0.01)
    found = json.loads(verb("ls", "--json", *address))
    (aa,) = found["namespaces"]
    assert (aa["chunks"], aa["bytes"]) == (20, 20 * (2**20 + HEADER_BYTES))
    assert aa["dram_chunks"] == found["tiers"]["dram"]["chunks"] < 8
    assert found["tiers"]["disk"]["chunks"] == 20


def test_ls_of_a_namespace_shows_its_keys(store: StoreServer, verb: Callable[..., str]) -> None:
    address = filled(store)
    found = json.loads(verb("ls", "--namespace", "aa", "--json", *address))
    assert found == {"namespace": "aa", "keys": {f"aa:{n}": 1000 + HEADER_BYTES for n in range(5)}, "more": False}
    short = json.loads(verb("ls", "--namespace", "aa", "--limit", "2", "--json", *address))
    assert (len(short["keys"]), short["more"]) == (2, True)
    assert json.loads(verb("ls", "--namespace", "a*", "--json", *address))["keys"] == {}
    assert "bb:k" in verb("ls", "--namespace", "bb", *address)


def test_ls_does_not_save_from_eviction_what_it_lists(
    start_store: Callable[..., StoreServer], verb: Callable[..., str]
) -> None:
    store = start_store(capacity_bytes=2**20, policy="lru")
    client = StoreClient(store.address, timeout_seconds=SECONDS)
    assert client.put(b"aa:old", Header(), b"x" * 10_000).stored
    for number in range(8):
        assert client.put(b"bb:%d" % number, Header(), b"y" * 100_000).stored
    verb("ls", "--namespace", "aa", "--address", store.address)
    verb("ls", "--address", store.address)
    for number in range(8, 12):
        assert client.put(b"bb:%d" % number, Header(), b"y" * 100_000).stored
    assert not client.exists(b"aa:old")
    client.close()


def test_drop_takes_what_it_is_told_and_nothing_else(store: StoreServer, verb: Callable[..., str]) -> None:
    address = filled(store)
    assert verb("drop", "--key", "aa:0", *address) == "dropped 1 chunk(s)\n"
    assert verb("drop", "--key", "aa:0", *address) == "dropped 0 chunk(s)\n"
    assert verb("drop", "--namespace", "aa", "--yes", *address) == "dropped 4 chunk(s)\n"
    assert verb("drop", "--namespace", "?b", "--yes", *address) == "dropped 0 chunk(s)\n"
    assert len(json.loads(verb("ls", "--json", *address))["namespaces"]) == 2
    assert verb("drop", "--all", "--yes", *address) == "dropped 2 chunk(s)\n"
    assert json.loads(verb("ls", "--json", *address))["namespaces"] == []


def test_drop_asks_first_and_wants_to_be_told_what(
    store: StoreServer, verb: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    address = filled(store)
    assert "drop everything from" in verb("drop", "--all", *address, code=2)
    assert "give --yes" in verb("drop", "--namespace", "aa", *address, code=2)
    assert "give one of --namespace, --key and --all" in verb("drop", *address, code=2)
    assert "give one of" in verb("drop", "--all", "--key", "x", *address, code=2)
    assert len(json.loads(verb("ls", "--json", *address))["namespaces"]) == 3


def test_bench_measures_and_leaves_nothing_behind(store: StoreServer, verb: Callable[..., str]) -> None:
    options = ["--seconds", "0.6", "--size", "64KiB", "--connections", "2", "--address", store.address]
    figures = json.loads(verb("bench", "--json", *options))
    assert (figures["size_bytes"], figures["connections"], figures["failures"]) == (65536, 2, {})
    assert figures["put_gb_per_second"] > 0
    assert figures["get_gb_per_second"] > 0
    assert figures["lookup_p99_seconds"] >= figures["lookup_p50_seconds"] > 0
    assert json.loads(verb("ls", "--json", "--address", store.address))["namespaces"] == []
    assert "GET, GB/s" in verb("bench", *options)


def test_bench_counts_what_a_store_refuses(start_store: Callable[..., StoreServer], verb: Callable[..., str]) -> None:
    store = start_store(max_value_bytes=1000)
    options = ["--seconds", "0.3", "--size", "64KiB", "--connections", "1", "--address", store.address]
    figures = json.loads(verb("bench", "--json", *options))
    assert figures["put_gb_per_second"] == 0
    assert figures["failures"]["put too_large"] > 0
    assert "give 1 byte to 1GiB" in verb("bench", "--size", "0", "--address", store.address, code=2)


def test_every_verb_reaches_a_store_behind_tls_and_logins(
    start_store: Callable[..., StoreServer],
    verb: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    leaf.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    leaf.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("hunter2\n"))
    verb("passwd", str(tmp_path / "users"), "ops", "--rights", "read,write,admin")
    store = start_store(
        users_file=tmp_path / "users", tls_certificate=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem"
    )
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "hunter2")
    way = ["--address", store.address, "--user", "ops", "--tls-ca", str(tmp_path / "ca.pem"), "--timeout-seconds", "10"]
    assert verb("ping", *way) == "PONG\n"
    assert json.loads(verb("stats", "--json", *way))["dram"]["items"] == 0
    assert json.loads(verb("ls", "--json", *way))["namespaces"] == []
    assert json.loads(verb("bench", "--json", "--seconds", "0.3", "--size", "1KiB", *way))["failures"] == {}
    assert verb("drop", "--all", "--yes", *way) == "dropped 0 chunk(s)\n"
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "wrong")
    said = verb("stats", *way, code=2)
    assert "refuses: WRONGPASS" in said
    assert "give a user and password that may do this" in said
    assert "certificate: unable to get local issuer" in verb("ping", *way[:4], "--tls", code=2)


class TestPasswd:
    @pytest.fixture
    def passwd(self, verb: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
        def call(*args: str, password: str = "", code: int = 0) -> str:
            monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))
            return verb("passwd", str(tmp_path / "users"), *args, code=code)

        return call

    def test_adds_changes_and_deletes_users(self, passwd: Callable[..., str], tmp_path: Path) -> None:
        path = tmp_path / "users"
        assert passwd("engines", password="one") == "added engines: read,write\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        said = passwd("team", "--rights", "read", "--prefix", "aa:", password="two")
        assert said == "added team: read, confined to keys that begin with aa:\n"
        assert passwd("team", password="three").startswith("changed team: read, confined")  # all else stays
        users = Users.of_file(path)
        team = users.authenticate("team", "three")
        assert team is not None
        assert (team.rights, team.prefix) == ({"read"}, b"aa:")
        assert users.authenticate("engines", "one") is not None
        assert passwd("team", "--rights", "admin", "--prefix", "", password="four") == "changed team: admin\n"
        assert passwd("team", "--delete") == "deleted team\n"
        assert set(path.read_text().split(":")[0].split()) == {"engines"}
        assert "one" not in path.read_text()

    @pytest.mark.parametrize(
        ("args", "password", "complaint"),
        [
            (["engines"], "", "password: a password of 0 bytes; give 1 to 512 bytes"),
            (["a b"], "x", "that is not a user's name"),
            (["a", "--rights", "fly"], "x", "'fly' is not a right"),
            (["a", "--rights", "admin", "--prefix", "x"], "x", "confined to a prefix and has the right admin"),
            (["a", "--delete"], "", "no user 'a' in"),
        ],
    )
    def test_refuses_what_cannot_be(
        self, passwd: Callable[..., str], tmp_path: Path, args: list[str], password: str, complaint: str
    ) -> None:
        assert complaint in passwd(*args, password=password, code=2)
        assert not (tmp_path / "users").exists()

    def test_leaves_a_file_alone_that_others_may_read(self, passwd: Callable[..., str], tmp_path: Path) -> None:
        (tmp_path / "users").write_text("")
        (tmp_path / "users").chmod(0o644)
        assert "chmod 600" in passwd("a", password="x", code=2)

    def test_asks_twice_on_a_terminal_and_shows_nothing(self, tmp_path: Path) -> None:
        pid, terminal = pty.fork()
        if pid == 0:
            os.execv(KVHEARTH[0], [*KVHEARTH, "passwd", str(tmp_path / "users"), "ops"])
        screen, give_up = b"", time.monotonic() + SECONDS
        answers = [(b"password of ops: ", b"open sesame\n"), (b"again: ", b"open sesame\n")]
        while time.monotonic() < give_up:
            if not select.select([terminal], [], [], 0.2)[0]:
                continue
            try:
                screen += os.read(terminal, 4096)
            except OSError:  # it has left the terminal
                break
            if answers and answers[0][0] in screen:
                os.write(terminal, answers.pop(0)[1])
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert b"sesame" not in screen
        assert Users.of_file(tmp_path / "users").authenticate("ops", "open sesame") is not None

    def test_two_that_differ_change_nothing(
        self, verb: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        typed = iter(["open sesame", "open sesam"])
        monkeypatch.setattr("getpass.getpass", lambda _prompt: next(typed))
        monkeypatch.setattr("sys.stdin", open("/dev/ptmx"))  # noqa: SIM115 - a terminal
        assert "password: the two differ; try again" in verb("passwd", str(tmp_path / "users"), "ops", code=2)
        sys.stdin.close()
        assert not (tmp_path / "users").exists()


def test_fsck_tells_whole_files_from_corrupt_ones(verb: Callable[..., str], tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "disk", 2**30)
    tier.start()
    for number in range(4):
        assert tier.write(b"k%d" % number, [memoryview(b"x" * 5000)])
    tier.close()
    assert json.loads(verb("fsck", str(tmp_path / "disk"), "--json"))["good"]["files"] == 4
    victim = max((path for path in (tmp_path / "disk").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[-100] ^= 1
    victim.write_bytes(data)
    assert "corrupt" in verb("fsck", str(tmp_path / "disk"), code=1)
    assert json.loads(verb("fsck", str(tmp_path / "disk"), "--delete", "--json"))["deleted"]["files"] == 1
    found = json.loads(verb("fsck", str(tmp_path / "disk"), "--json"))
    assert (found["good"]["files"], found["deleted"]["files"]) == (3, 0)
    assert "is no folder of a disk tier" in verb("fsck", str(tmp_path), code=2)
