"""Who may run which command, and that a refusal ends no pipeline."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvhearth.store.protocol.packed import pack_keys
from kvhearth.store.server import users
from kvhearth.store.server.commands import COMMANDS
from kvhearth.store.server.passwords import Hash
from kvhearth.store.server.server import StoreServer

from ..fakes import SECONDS, eventually

RIGHTS = {
    "reader": ("read", ""),
    "writer": ("write", ""),
    "both": ("read,write", ""),
    "ops": ("admin", ""),
    "team": ("read,write", "team:"),
}


def line(name: str, rights: str, prefix: str) -> str:
    salt = b"salt" * 4
    digest = hashlib.scrypt(b"x", salt=salt, n=1024, r=1, p=1, dklen=32)
    return f"{name}:{Hash(10, 1, 1, salt, digest).phc()}:{rights}:{prefix}\n"


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All of `RIGHTS`, with the password x; looked at before each command."""
    monkeypatch.setattr(users, "_LOOK_AGAIN_SECONDS", 0.0)
    path = tmp_path / "users"
    write_users(path, RIGHTS)
    return path


def write_users(path: Path, rights: dict[str, tuple[str, str]]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(line(name, *given) for name, given in rights.items()))
    new.chmod(0o600)
    new.replace(path)


@pytest.fixture
def guarded(start_store: Callable[..., StoreServer], users_file: Path) -> StoreServer:
    """A store with these users, and a value or two."""
    store = start_store(users_file=users_file)
    both = As(store, "both")
    assert both("MSET", "team:k", "ours", "other:k", "theirs", "team:kept", "v") == b"OK"
    both.close()
    return store


class As:
    """A connection of one user; errors come back as text."""

    def __init__(self, store: StoreServer, name: str, protocol: int = 2) -> None:
        self.connection = redis.Connection(
            port=store.addresses[0].port, username=name, password="x", socket_timeout=SECONDS, protocol=protocol
        )
        self.connection.connect()

    def __call__(self, *args: str | bytes | int) -> Any:
        self.connection.send_command(*args)
        return self.read()

    def read(self) -> Any:
        try:
            return self.connection.read_response()
        except redis.ResponseError as error:
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        self.connection.disconnect()


@pytest.fixture
def log_in(guarded: StoreServer) -> Iterator[Callable[..., As]]:
    """Logs in to `guarded`."""
    opened: list[As] = []

    def make(name: str, protocol: int = 2) -> As:
        opened.append(As(guarded, name, protocol))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


LogIn = Callable[..., As]


def example(name: str, key: bytes) -> list[bytes]:
    """A call of a command that is well-formed, on ``key`` where it takes one."""
    entry = COMMANDS[name.upper().encode()]
    given = {
        "client": [b"ID"],
        "config": [b"GET", b"save"],
        "memory": [b"USAGE", key],
        "scan": [b"0"],
        "echo": [b"x"],
        "select": [b"0"],
        "kv.pin": [b"1", key],
        "set": [key, bytes(50_000)],
        "expire": [key, b"100"],
        "kv.mput": [key, bytes(50_000)],
        "mset": [key, bytes(50_000)],
        "subscribe": [b"kv.events"],
    }.get(name)
    if given is None:
        given = [key] if entry.keys[0] else []
    return [entry.name.encode(), *given]


OF_SHARED_MEMORY = ("kv.attach", "kv.reserve", "kv.commit", "kv.abandon", "kv.lease", "kv.release")
"""They need a unix socket and have tests of their own."""

ASKABLE = [entry.name for entry in COMMANDS.values() if entry.name not in ("auth", "hello", "quit", *OF_SHARED_MEMORY)]


class TestRights:
    @pytest.mark.parametrize("user", RIGHTS)
    def test_each_command_is_for_those_who_have_its_right_and_a_pipeline_goes_on(
        self, guarded: StoreServer, log_in: LogIn, user: str
    ) -> None:
        rights, _ = RIGHTS[user]
        connection = log_in(user)
        for name in ASKABLE:
            if name in ("kv.events", "subscribe", "unsubscribe", "flushdb", "flushall"):
                continue  # they change what may be asked next, or what there is: see below
            right = COMMANDS[name.upper().encode()].right
            connection.connection.send_packed_command(
                connection.connection.pack_commands([example(name, b"team:k"), [b"PING", b"next"]])
            )
            answer = connection.read()
            assert connection.read() == b"next", name
            refused = isinstance(answer, str) and answer.startswith("NoPermissionError")
            assert refused == bool(right and right not in rights.split(",")), (name, answer)
            if refused:
                assert answer.endswith(f"User {user} has no permissions to run the '{name}' command")

    @pytest.mark.parametrize("name", ["kv.events", "subscribe", "flushdb", "flushall"])
    def test_following_is_reading_and_flushing_is_the_administrators(self, log_in: LogIn, name: str) -> None:
        for user, (rights, _) in RIGHTS.items():
            answer = log_in(user)(*example(name, b"k"))
            may = COMMANDS[name.upper().encode()].right in rights.split(",")
            assert may == ("no permissions" not in str(answer))

    def test_every_command_that_changes_anything_needs_a_right(self) -> None:
        free = {entry.name for entry in COMMANDS.values() if not entry.right} - {*OF_SHARED_MEMORY}
        assert free == {
            "auth", "client", "command", "echo", "hello", "info", "kv.stats", "ping", "quit", "select", "unsubscribe",
        }  # fmt: skip


class TestPrefixes:
    KEYED = tuple(name for name in ASKABLE if COMMANDS[name.upper().encode()].keys[0])

    @pytest.mark.parametrize("name", KEYED)
    def test_a_key_beyond_the_prefix_is_refused_and_a_pipeline_goes_on(
        self, guarded: StoreServer, log_in: LogIn, name: str
    ) -> None:
        connection = log_in("team")
        connection.connection.send_packed_command(
            connection.connection.pack_commands([example(name, b"other:k"), [b"PING", b"next"]])
        )
        answer = connection.read()
        assert connection.read() == b"next"
        if name == "kv.mput":
            (answer,) = answer
        assert "No permissions to access a key" in str(answer)
        assert log_in("both")("GET", "other:k") == b"theirs"
        assert guarded.store.table.stats().uploading_bytes == 0

    @pytest.mark.parametrize("name", ["kv.match", "kv.exists", "kv.mget", "kv.unpin", "kv.prefetch"])
    def test_also_among_packed_keys(self, log_in: LogIn, name: str) -> None:
        packed = pack_keys([b"team:kept", b"other:key"])
        assert packed is not None
        assert "No permissions to access a key" in log_in("team")(name, packed)

    def test_one_key_beyond_the_prefix_does_not_hide_the_others_of_a_put(self, log_in: LogIn) -> None:
        answers = log_in("team")("KV.MPUT", "team:a", "1", "other:a", "2", "team:b", "3")
        assert answers[0] == answers[2] == b"OK"
        assert "No permissions to access a key" in str(answers[1])
        assert log_in("both")("MGET", "team:a", "other:a", "team:b") == [b"1", None, b"3"]

    def test_a_scan_shows_the_users_own_keys(self, log_in: LogIn) -> None:
        assert sorted(log_in("team")("SCAN", "0", "COUNT", 100)[1]) == [b"team:k", b"team:kept"]
        assert log_in("team")("SCAN", "0", "COUNT", 100, "MATCH", "other*")[1] == []

    def test_followers_hear_of_their_own_keys(self, log_in: LogIn) -> None:
        ours = log_in("team")
        assert ours("KV.EVENTS")[0] == b"hello"
        told = []
        while not told or told[-1][0] != b"live":
            told.append(ours.read())
        assert b"other" not in repr(told).encode()
        both = log_in("both")
        both("SET", "other:new", "v")
        both("SET", "team:new", "v")
        assert ours.read()[3].endswith(b"team:new")


class TestChanges:
    def test_a_follower_whose_rights_are_taken_away_hears_no_more(
        self, guarded: StoreServer, log_in: LogIn, users_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhearth.store.server.feed._PING_SECONDS", 0.05)
        follower, both = log_in("reader"), log_in("both")
        follower("KV.EVENTS")
        while (message := follower.read())[0] != b"live":
            pass
        write_users(users_file, {**RIGHTS, "reader": ("write", "")})
        both("SET", "secret", "v")
        while (passed := follower.read())[0] != b"ping" or passed[1] == message[1]:
            assert passed[0] == b"ping"
        write_users(users_file, RIGHTS)
        eventually(lambda: both("SET", "public", "v") == b"OK")
        while (message := follower.read())[0] != b"put":
            pass
        assert message[3].endswith(b"public")


def test_command_info_and_docs_tell_of_every_command(redis_py: redis.Redis) -> None:
    known = redis_py.execute_command("COMMAND")
    assert len(known) == len(COMMANDS)
    assert redis_py.execute_command("COMMAND COUNT") == len(COMMANDS)
    for entry in COMMANDS.values():
        assert entry.summary.endswith(".")
        assert (entry.handler is None) != (entry.receiver is None)
