"""Who may do what: the users file, logins, rights and prefixes, on real servers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvhearth.errors import UserError
from kvhearth.metrics import parse_exposition
from kvhearth.store.client.async_client import AsyncStoreClient
from kvhearth.store.client.client import StoreClient
from kvhearth.store.client.outcomes import GetResult, MissReason, PutResult
from kvhearth.store.protocol.header import Header
from kvhearth.store.server import passwords, users
from kvhearth.store.server.passwords import Hash
from kvhearth.store.server.server import StoreServer
from kvhearth.store.server.users import MAX_USERS, User, Users, read_users_file

SECONDS = 10.0


def line(name: str, password: str, rights: str = "read,write", prefix: str = "") -> str:
    """A user's line with a hash that is quick to check."""
    salt = b"salt" * 4
    digest = hashlib.scrypt(password.encode(), salt=salt, n=1024, r=1, p=1, dklen=32)
    return f"{name}:{Hash(10, 1, 1, salt, digest).phc()}:{rights}:{prefix}\n"


@pytest.fixture
def users_file(tmp_path: Path) -> Callable[..., Path]:
    """Writes the users file that only we may read."""

    def write(*lines: str, mode: int = 0o600) -> Path:
        path = tmp_path / "users"
        new = tmp_path / "users.new"
        new.write_text("".join(lines))
        new.chmod(mode)
        new.replace(path)
        return path

    return write


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file each time, and do not make us wait for our mistakes."""
    monkeypatch.setattr(users, "_LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(users, "_PENALTY_SECONDS", 0.0)


@pytest.fixture
def hashings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The cost of every scrypt that runs."""
    costs: list[tuple[int, int, int]] = []
    real = passwords._scrypt

    def counted(password: bytes, like: Hash) -> bytes:
        costs.append(like[:3])
        return real(password, like)

    monkeypatch.setattr(passwords, "_scrypt", counted)
    return costs


def test_a_user_logs_in_with_the_right_password_only(users_file: Callable[..., Path]) -> None:
    known = Users.of_file(users_file("# engines\n", "\n", line("engines", "secret"), line("ops", "other", "admin")))
    assert known.authenticate("engines", "secret") == known.authenticate("engines", b"secret")
    user = known.authenticate("engines", "secret")
    assert user is not None
    assert (user.name, user.rights, user.prefix) == ("engines", {"read", "write"}, b"")
    for name, password in [("engines", "other"), ("engines", ""), ("nobody", "secret"), ("", ""), ("\ud800", "x")]:
        assert known.authenticate(name, password) is None
    assert len(known) == 2


def test_a_single_password_is_the_default_user_with_every_right() -> None:
    known = Users.of_password("secret")
    user = known.authenticate("default", "secret")
    assert user is not None
    assert all(user.may(right, b"any key") for right in ("read", "write", "admin"))
    assert known.authenticate("default", "Secret") is None
    assert known.authenticate("engines", "secret") is None
    assert known.current(user) == user


def test_an_unknown_name_costs_what_a_wrong_password_costs(
    users_file: Callable[..., Path], hashings: list[tuple[int, int, int]]
) -> None:
    known = Users.of_file(users_file(line("engines", "secret")))
    known.authenticate("engines", "wrong")
    wrong, hashings[:] = list(hashings), []
    known.authenticate("nobody", "wrong")
    assert hashings == wrong == [(10, 1, 1)]


def test_an_engine_that_reconnects_costs_no_hashing_until_its_password_changes(
    users_file: Callable[..., Path], hashings: list[tuple[int, int, int]]
) -> None:
    known = Users.of_file(users_file(line("engines", "secret")))
    for _ in range(5):
        assert known.authenticate("engines", "secret") is not None
    assert len(hashings) == 1
    assert known.authenticate("engines", "wrong") is None
    assert len(hashings) == 2
    users_file(line("engines", "new secret"))
    assert known.authenticate("engines", "secret") is None
    assert known.authenticate("engines", "new secret") is not None


def test_a_failed_login_pauses_its_connection_and_is_counted(
    users_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Users.of_file(users_file(line("engines", "secret")))
    pauses: list[float] = []
    monkeypatch.setattr(users, "_PENALTY_SECONDS", 0.25)
    monkeypatch.setattr(time, "sleep", pauses.append)
    known.authenticate("engines", "wrong")
    known.authenticate("nobody", "secret")
    known.authenticate("engines", "secret")
    assert pauses == [0.25, 0.25]
    logins = dict(next(iter(known.metrics())).samples)
    assert logins == {("ok",): 1, ("wrong",): 2, ("busy",): 0}


def test_more_attempts_than_can_be_hashed_are_refused_as_busy_but_known_engines_get_in(
    users_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Users.of_file(users_file(line("engines", "secret"), line("ops", "other")))
    assert known.authenticate("engines", "secret") is not None
    monkeypatch.setattr(users, "_WAIT_SECONDS", 0.01)
    for _ in range(users._CHECKS_AT_ONCE):  # as many attempts are being hashed
        assert known._checks.acquire(timeout=SECONDS)
    assert known.authenticate("ops", "other") is None
    assert known.authenticate("engines", "secret") is not None
    assert dict(next(iter(known.metrics())).samples)[("busy",)] == 1


def test_no_password_and_no_unknown_name_gets_into_the_log(
    users_file: Callable[..., Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "_LOG_EVERY_SECONDS", 0.0)
    known = Users.of_file(users_file(line("engines", "secret")))
    with caplog.at_level(logging.DEBUG):
        known.authenticate("engines", "hunter2")
        known.authenticate("hunter3", "")  # typed into the wrong place
        known.authenticate("engines", "secret")
    assert "login of user 'engines' failed" in caplog.text
    assert "login of an unknown user failed" in caplog.text
    for secret in ("hunter2", "hunter3", "secret", "$scrypt"):
        assert secret not in caplog.text
    assert repr(known) == "Users(1)"


def test_failures_fill_no_log(users_file: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    known = Users.of_file(users_file(line("engines", "secret")))
    for _ in range(50):
        known.authenticate("engines", "wrong")
    assert caplog.text.count("failed") == 1


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o601, 0o660, 0o666])
def test_a_file_that_others_may_read_or_change_is_refused(users_file: Callable[..., Path], mode: int) -> None:
    path = users_file(line("engines", "secret"), mode=mode)
    with pytest.raises(UserError, match=rf"others may read or change .* \(mode {mode:04o}\); chmod 600 {path}"):
        Users.of_file(path)


def test_the_group_may_read_it_as_mounted_secrets_are(users_file: Callable[..., Path]) -> None:
    assert len(Users.of_file(users_file(line("engines", "secret"), mode=0o440))) == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("engines:secret\n", "users:1: 2 of 4 fields; write name:hash:rights:prefix"),
        ("\n# x\nengines:secret:read:\n", "users:3: the hash is not one that is understood; set the password anew"),
        (line("bad name", "x"), "users:1: that is not a user's name"),
        (line("a", "x", "read,fly"), "users:1: 'fly' is not a right; give some of read, write, admin"),
        (line("a", "x", ""), "users:1: '' is not a right"),
        (line("a", "x", "admin", "ns:"), "users:1: user 'a' is confined to a prefix and has the right admin"),
        (line("a", "x", "read", "n s"), "users:1: the prefix of user 'a' cannot begin a key"),
        (line("a", "x", "read", "n" * 513), "users:1: the prefix of user 'a' cannot begin a key"),
        (line("a", "x") + line("b", "x") + line("a", "y"), "users:3: user 'a' is there twice; remove one of the two"),
        ("".join(line("a", "x").replace("a:", f"u{n}:", 1) for n in range(MAX_USERS + 1)), "more than 1000 users"),
        ("#" * (2**20 + 1), "has more than 1 MiB"),
    ],
)
def test_a_wrong_line_is_named_and_no_secret_is(users_file: Callable[..., Path], text: str, complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        read_users_file(users_file(text))
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "$scrypt" not in str(refused.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"users_file: cannot read .*No such file.*make it with 'kvhearth store passwd'"
    ):
        Users.of_file(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(UserError, match="is not UTF-8"):
        Users.of_file(tmp_path / "binary")


def test_a_prefix_may_hold_colons(users_file: Callable[..., Path]) -> None:
    user = Users.of_file(users_file(line("a", "x", "read", "ns:1:"))).authenticate("a", "x")
    assert user is not None
    assert user.prefix == b"ns:1:"


def test_the_file_is_read_again_when_it_changes(users_file: Callable[..., Path]) -> None:
    known = Users.of_file(users_file(line("a", "x"), line("b", "x"), line("c", "x")))
    a, b, c = (known.authenticate(name, "x") for name in "abc")
    assert a
    assert b
    assert c
    version = known.version
    users_file(line("a", "x", "read"), line("c", "y"))
    known.refresh()
    assert known.version > version
    assert known.current(a) == User("a", frozenset({"read"}), b"", a.secret_id)  # other rights
    assert known.current(b) is None  # gone
    assert known.current(c) is None  # another password
    users_file("")
    known.refresh()
    assert known.current(a) is None
    assert known.authenticate("a", "x") is None


def test_a_broken_file_leaves_the_last_good_one_in_force_and_says_so_once(
    users_file: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    known = Users.of_file(users_file(line("a", "x")))
    path = users_file("nonsense\n")
    for _ in range(3):
        assert known.authenticate("a", "x") is not None
    assert caplog.text.count("cannot be used, the last good one stays in force") == 1
    assert dict(list(known.metrics())[1].samples) == {(): 1}
    path.unlink()
    assert known.authenticate("a", "x") is not None
    users_file(line("b", "x"))
    assert known.authenticate("a", "x") is None
    assert known.authenticate("b", "x") is not None
    assert dict(list(known.metrics())[1].samples) == {(): 0}


def test_rights_and_prefix_of_a_user() -> None:
    user = User("a", frozenset({"read"}), b"ns:")
    assert user.may("read")
    assert user.may("read", b"ns:1")
    assert not user.may("read", b"n")
    assert not user.may("write", b"ns:1")
    assert "secret" not in repr(User("a", secret_id=b"secret"))


# On a running server.

READS: list[tuple[Any, ...]] = [
    ("GET", "ns:k"),
    ("MGET", "ns:k"),
    ("EXISTS", "ns:k"),
    ("STRLEN", "ns:k"),
    ("TTL", "ns:k"),
    ("DBSIZE",),
    ("SCAN", "0"),
    ("KV.MATCH", "ns:k"),
    ("KV.EXISTS", "ns:k"),
]
WRITES: list[tuple[Any, ...]] = [("SET", "ns:k", "v"), ("MSET", "ns:k", "v"), ("DEL", "ns:k"), ("EXPIRE", "ns:k", 9)]
ADMINS: list[tuple[Any, ...]] = [("FLUSHDB",), ("FLUSHALL",)]


def connect(store: StoreServer, name: str | None = None, password: str = "x") -> redis.Redis:
    return redis.Redis(
        port=store.addresses[0].port,
        socket_timeout=SECONDS,
        username=name,
        password=password if name else None,
        retry=Retry(NoBackoff(), 0),
    )


@pytest.mark.parametrize("rights", ["read", "write", "admin", "read,write", "read,write,admin"])
def test_each_command_needs_its_right(
    start_store: Callable[..., StoreServer], users_file: Callable[..., Path], rights: str
) -> None:
    store = start_store(users_file=users_file(line("a", "x", rights)))
    with connect(store, "a") as client:
        assert client.ping()
        for right, commands in (("read", READS), ("write", WRITES), ("admin", ADMINS)):
            for command in commands:
                if right in rights.split(","):
                    client.execute_command(*command)
                else:
                    with pytest.raises(redis.exceptions.NoPermissionError, match="User a has no permissions"):
                        client.execute_command(*command)


def test_without_a_login_nothing_but_logging_in(
    start_store: Callable[..., StoreServer], users_file: Callable[..., Path]
) -> None:
    store = start_store(users_file=users_file(line("a", "x", "read,write,admin")))
    with connect(store) as client:
        for command in (*READS, *WRITES, *ADMINS, ("PING",), ("INFO",), ("KV.STATS",)):
            with pytest.raises(redis.AuthenticationError):
                client.execute_command(*command)
    for name, password in (("a", "y"), ("b", "x"), ("default", "x")):
        with connect(store, name, password) as client, pytest.raises(redis.AuthenticationError):
            client.ping()


def test_a_confined_user_neither_sees_nor_changes_what_is_not_under_its_prefix(
    start_store: Callable[..., StoreServer], users_file: Callable[..., Path]
) -> None:
    store = start_store(users_file=users_file(line("all", "x"), line("one", "x", "read,write", "ns:")))
    with connect(store, "all") as everyone, connect(store, "one") as one:
        everyone.mset({"ns:1": "a", "other:1": "b"})
        assert one.get("ns:1") == b"a"
        one.set("ns:2", "c")
        assert sorted(one.scan_iter()) == [b"ns:1", b"ns:2"]
        for command in (
            ("GET", "other:1"),
            ("MGET", "ns:1", "other:1"),
            ("SET", "other:1", "x"),
            ("MSET", "ns:3", "c", "other:1", "x"),
            ("DEL", "other:1"),
            ("DEL", "ns:1", "other:1"),
            ("STRLEN", "other:1"),
            ("KV.MATCH", "other:1"),
            ("KV.PIN", "10", "other:1"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                one.execute_command(*command)
        assert everyone.get("other:1") == b"b"
        assert everyone.get("ns:1") == b"a"


def test_a_user_who_is_removed_or_loses_a_right_feels_it_on_an_open_connection(
    start_store: Callable[..., StoreServer], users_file: Callable[..., Path]
) -> None:
    store = start_store(users_file=users_file(line("a", "x"), line("b", "x")))
    with connect(store, "a") as a, connect(store, "b") as b:
        a.set("k", "v")
        b.set("k", "v")
        users_file(line("a", "x", "read"))
        with pytest.raises(redis.exceptions.NoPermissionError):
            a.set("k", "w")
        assert a.get("k") == b"v"
        with pytest.raises(redis.AuthenticationError):
            b.get("k")


def test_our_client_logs_in_and_a_wrong_password_is_a_miss_with_a_reason(
    start_store: Callable[..., StoreServer], users_file: Callable[..., Path]
) -> None:
    store = start_store(users_file=users_file(line("engines", "x")), http_listen="127.0.0.1:0")
    good = StoreClient(store.address, user="engines", password="x", timeout_seconds=SECONDS)
    bad = StoreClient(store.address, user="engines", password="y", timeout_seconds=SECONDS)
    try:
        assert good.ping() is None
        refused = bad.ping()
        assert refused is not None
        assert refused.value == "refused"
        page = parse_exposition(store.registry.expose().decode())
        assert page["kvhearth_store_logins_total"][(("outcome", "ok"),)] == 1
        assert page["kvhearth_store_logins_total"][(("outcome", "wrong"),)] >= 1
    finally:
        good.close()
        bad.close()


def test_no_secret_is_in_a_repr() -> None:
    assert "hunter2" not in repr(StoreClient("127.0.0.1:1", password="hunter2"))
    assert "hunter2" not in repr(Users.of_password("hunter2"))


class TestWhoMayOnlyRead:
    """A user's missing right says nothing of the store: it goes on being asked for what the user may have."""

    @pytest.fixture
    def address(self, users_file: Callable[..., Path], start_store: Callable[..., StoreServer]) -> str:
        """A store with a whole row, a corrupt one, and a user ``reader``."""
        store = start_store(users_file=users_file(line("writer", "pw"), line("reader", "pw", "read")))
        writer = StoreClient(store.address, user="writer", password="pw", timeout_seconds=SECONDS)
        assert all(writer.put(key, Header(), b"row" * 100).stored for key in (b"whole", b"corrupt"))
        writer.close()
        slot = store.store.table.lease(b"corrupt")
        assert slot is not None
        store.store.table.views(slot)[0][100:101] = b"!"
        store.store.table.release(slot)
        return store.address

    def check(self, corrupt: list[GetResult], puts: list[PutResult], whole: GetResult, is_down: bool) -> None:
        assert [result.reason for result in corrupt] == [MissReason.CHECKSUM] * 5
        assert [result.reason for result in puts] == [MissReason.REFUSED] * 5
        assert whole.hit
        assert not is_down

    def test_with_threads(self, address: str) -> None:
        client = StoreClient(address, user="reader", password="pw", timeout_seconds=SECONDS)
        buffer = bytearray(300)
        corrupt = [client.get_into(b"corrupt", buffer) for _ in range(5)]
        puts = [client.put(b"new", Header(), b"row") for _ in range(5)]
        self.check(corrupt, puts, client.get_into(b"whole", buffer), client.is_down)
        client.close()

    def test_with_asyncio(self, address: str) -> None:
        async def ask() -> None:
            client = AsyncStoreClient(address, user="reader", password="pw", timeout_seconds=SECONDS)
            buffer = bytearray(300)
            corrupt = [await client.get_into(b"corrupt", buffer) for _ in range(5)]
            puts = [await client.put(b"new", Header(), b"row") for _ in range(5)]
            self.check(corrupt, puts, await client.get_into(b"whole", buffer), client.is_down)
            client.close()

        asyncio.run(ask())
