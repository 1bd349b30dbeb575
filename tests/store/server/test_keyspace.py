"""Redis's commands answer as Redis does: the same scripts run against a real one, answer by answer."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvhearth.store.server.keyspace import _glob
from kvhearth.store.server.server import StoreServer

from ..fakes import SECONDS, eventually

MIB = 2**20
Answers = Callable[..., Any]


class Raw:
    """A connection on which commands are sent as they are; errors come back as text."""

    def __init__(self, connection: redis.Connection) -> None:
        self._connection = connection
        connection.connect()

    def __call__(self, *args: str | bytes | int) -> Any:
        self._connection.send_command(*args)
        try:
            answer = self._connection.read_response()
        except redis.ResponseError as error:
            answer = error
        return f"{type(answer).__name__}: {answer}" if isinstance(answer, Exception) else answer

    def close(self) -> None:
        self._connection.disconnect()


@pytest.fixture
def ours(store: StoreServer) -> Iterator[Raw]:
    """A connection to `store`."""
    made = Raw(redis.Connection(port=store.addresses[0].port, socket_timeout=SECONDS, protocol=2))
    yield made
    made.close()


@pytest.fixture(scope="module")
def redis_socket(redis_server_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis on a unix socket."""
    path = tmp_path_factory.mktemp("redis") / "socket"
    command = [redis_server_binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(path.parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        eventually(path.exists)
        yield str(path)
        process.terminate()


@pytest.fixture
def real(redis_socket: str) -> Iterator[Raw]:
    """A connection to a real, empty Redis."""
    made = Raw(redis.UnixDomainSocketConnection(path=redis_socket, socket_timeout=SECONDS, protocol=2))
    made("FLUSHALL")
    yield made
    made.close()


SCRIPTS = {
    "set and get": "SET a 1|GET a|SET a 2|GET a|GET absent|SET b ''|GET b|STRLEN b|STRLEN a|STRLEN absent|EXISTS b",
    "conditions": "SET a 1 NX|SET a 2 NX|GET a|SET a 3 XX|SET b 1 XX|GET b|SET a 4 xx px 100000|GET a|SET a 1 NX XX",
    "life": "SET a 1 EX 100|TTL a|SET a 1|TTL a|PTTL a|TTL absent|PTTL absent|EXPIRE a 50|TTL a|EXPIRE absent 5",
    "no life": "SET a 1|EXPIRE a 0|GET a|SET a 1|EXPIRE a -5|EXISTS a|SET a 1|EXPIRE a x|EXPIRE a 1.5|EXPIRE a ''",
    "wrong lives": "SET a 1 EX 0|SET a 1 EX -1|SET a 1 PX 0|SET a 1 EX x|SET a 1 EX|SET a 1 EX 1.5|SET a 1 EX 5 PX 5",
    "wrong options": "SET a 1 SOON|SET a 1 NX NX NX XX|SET a 1 EX 5 EX|GET a|EXISTS a|SET a 1 5|SET a 1 nx|GET a",
    "many": "MSET a 1 b 2 c 3|MGET a b absent c a|EXISTS a b a absent|DEL a a absent|UNLINK b b|DBSIZE|MGET a b c",
    "touch": "MSET a 1 b 2|TOUCH a b a absent|TOUCH absent|EXISTS absent|DBSIZE",
    "overwriting": "MSET a 1 a 2|GET a|SET a 3 EX 100|MSET a 4|TTL a|DBSIZE",
    "flush": "MSET a 1 b 2|DBSIZE|FLUSHDB|DBSIZE|FLUSHALL ASYNC|GET a|FLUSHDB SYNC|FLUSHDB LATER|FLUSHDB SYNC x",
    "scan": "SCAN 0|SET a 1|SCAN 0 COUNT 100|SCAN 0 MATCH b*|SCAN 0 TYPE string|SCAN 0 TYPE hash MATCH *",
    "wrong scans": "SCAN x|SCAN 0 COUNT|SCAN 0 COUNT x|SCAN 0 COUNT 0|SCAN 0 SOON 1|SCAN 0 MATCH|SCAN 0 COUNT -5",
    "arities": "GET|GET a b|SET|SET a|MGET|DEL|EXISTS|STRLEN|STRLEN a b|TTL|PTTL a b|EXPIRE a|DBSIZE x|SCAN|ECHO|TOUCH",
    "greetings": "PING|PING hello|PING a b|ECHO hello|ECHO|SELECT 0|SELECT x",
    "client": "CLIENT GETNAME|CLIENT SETNAME me|CLIENT GETNAME|CLIENT SETNAME 'a b'|CLIENT GETNAME",
    "memory": "MEMORY USAGE absent",
    "config": "CONFIG GET save|CONFIG GET nothing|CONFIG GET appendonly",
    "binary": "SET \x00\xff\r\n \x00\r\n|GET \x00\xff\r\n|SCAN 0 COUNT 10|STRLEN \x00\xff\r\n",
    "unknown": "NOSUCH a 1|NOSUCH|nosuch 'with args' 2",
}


def words(line: str) -> list[bytes]:
    return [word.strip("'").encode("latin-1") for word in re.findall(r"'[^']*'|[^ ]+", line)]


def comparable(answer: Any) -> Any:
    """Redis 6 and 7 differ in quotes and in the case of command names in errors."""
    if isinstance(answer, str):
        return re.sub(r"[`',]", "", answer).lower().strip().removesuffix(" command")
    return answer


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_answered_as_redis_answers_it(ours: Raw, real: Raw, name: str) -> None:
    for line in SCRIPTS[name].split("|"):
        answers = [comparable(server(*words(line))) for server in (ours, real)]
        assert answers[0] == answers[1], line


def test_wrong_arities_of_mset_are_told(ours: Raw) -> None:
    assert ours("MSET", "a", "1", "b") == "ResponseError: wrong number of arguments for 'mset' command"
    assert ours("MSET") == "ResponseError: wrong number of arguments for 'mset' command"


def test_a_value_is_gone_when_its_time_is_over(ours: Raw, store: StoreServer) -> None:
    assert ours("SET", "a", "1", "PX", 30) == b"OK"
    assert 0 < ours("PTTL", "a") <= 30
    eventually(lambda: ours("GET", "a") is None)
    assert ours("TTL", "a") == -2
    assert ours("DBSIZE") == 0
    assert store.store.table.stats().expirations == 1


def test_a_value_without_a_life_lives_as_long_as_the_store_says(start_store: Callable[..., StoreServer]) -> None:
    store = start_store(default_ttl_seconds=100)
    with redis.Redis(port=store.addresses[0].port) as client:
        client.set("a", "1")
        assert 95 < client.ttl("a") <= 100
        client.set("b", "1", ex=500)
        assert client.ttl("b") > 400


def test_memory_usage_tells_what_a_value_takes(ours: Raw) -> None:
    ours("SET", "small", "v")
    ours("SET", "large", bytes(MIB))
    assert 512 < ours("MEMORY", "USAGE", "small") < 2048
    assert MIB < ours("MEMORY", "USAGE", "large", "SAMPLES", "5") < MIB + 2048
    assert "unknown subcommand" in ours("MEMORY", "DOCTOR")


def test_config_get_tells_the_settings(store: StoreServer, ours: Raw) -> None:
    assert ours("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"%d" % (8 * MIB)]
    assert len(ours("CONFIG", "GET", "max*", "timeout")) == 8
    assert ours("CONFIG", "SET", "maxmemory", "1").startswith("ResponseError: CONFIG GET is all there is")


def test_info_has_what_rediss_tools_look_at(redis_py: redis.Redis) -> None:
    redis_py.set("a", "1")
    redis_py.get("a")
    redis_py.get("absent")
    info = redis_py.info()
    assert info["redis_version"] == "7.0.0"
    assert info["db0"]["keys"] == 1
    assert (info["keyspace_hits"], info["keyspace_misses"]) == (1, 1)
    assert info["maxmemory"] == 8 * MIB
    assert set(redis_py.info("memory")) < set(info)


def test_quit_is_answered_and_ends_the_connection(ours: Raw) -> None:
    assert ours("QUIT") == b"OK"
    with pytest.raises(redis.ConnectionError):
        ours("PING")


def test_redis_py_finds_its_way(redis_py: redis.Redis) -> None:
    assert redis_py.set("a", "1", ex=100)
    assert redis_py.set("a", "1", nx=True) is None
    assert redis_py.mset({"b": "2", "c": "3"})
    assert redis_py.mget("a", "b", "x") == [b"1", b"2", None]
    assert sorted(redis_py.scan_iter(match="[ab]", count=1)) == [b"a", b"b"]
    assert redis_py.touch("a", "b", "x") == 2
    assert redis_py.unlink("a", "x") == 1
    assert redis_py.memory_usage("b") > 0
    assert redis_py.config_get("maxmemory*")["maxmemory-policy"]
    assert redis_py.client_id() > 0
    assert redis_py.command_count() > 30
    assert redis_py.dbsize() == 2
    with redis_py.pipeline(transaction=False) as pipe:
        pipe.set("d", "4").get("d").lpush("d", "x").get("d")
        answers = pipe.execute(raise_on_error=False)
    assert answers[0]
    assert answers[1] == answers[3] == b"4"
    assert isinstance(answers[2], redis.ResponseError)


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_a_scan_meets_every_key_that_stays_while_others_come_and_go(
    redis_py: redis.Redis, store: StoreServer, count: int
) -> None:
    staying = {b"stays:%d" % number for number in range(200)}
    for key in staying:
        redis_py.set(key, "v")
    met, cursor, number = [], 0, 0
    while True:
        cursor, keys = redis_py.scan(cursor, count=count, match="stays:*")
        met += keys
        redis_py.set(f"passing:{number}", "v")
        redis_py.delete(f"passing:{number - 3}")
        number += 1
        if not cursor:
            break
    assert sorted(met) == sorted(staying)


class TestPatterns:
    @pytest.mark.parametrize(
        "pattern",
        ["*", "a*", "*a", "h?llo", "h[ae]llo", "h[^e]llo", "h[a-b]llo", "h[b-a]llo", "h\\*llo", "*l*o*", "[", "[a",
         "[]", "", "h[!e]llo", "h[\\]e]llo", "**", "a.c", "a+", "(a)", "\\", "[^]", "\x00*", "*\n*", "h[a-]llo", "?"],
    )  # fmt: skip
    def test_they_match_what_redis_matches(self, ours: Raw, real: Raw, pattern: str) -> None:
        names = ["hello", "hallo", "hxllo", "h*llo", "h]llo", "h!llo", "h^llo", "a", "b", "ac", "a.c", "a+", "(a)",
                 "aa", "[", "[a", "\\", "\x00x", "a\nb", "h-llo", "]"]  # fmt: skip
        for server in (ours, real):
            server("MSET", *(word for name in names for word in (name, "v")))
        found = [sorted(server("SCAN", "0", "COUNT", 1000, "MATCH", pattern)[1]) for server in (ours, real)]
        assert found[0] == found[1]

    @given(
        st.text("ab*?", max_size=8).map(str.encode),
        st.text("ab", max_size=8).map(str.encode),
    )
    def test_stars_match_as_in_the_shell(self, pattern: bytes, name: bytes) -> None:
        assert bool(_glob(pattern).fullmatch(name)) == fnmatch.fnmatchcase(name, pattern)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
    @given(pattern=st.text("ab*?[]^-\\", max_size=6), name=st.text("ab-^]\\", min_size=1, max_size=4))
    def test_any_pattern_matches_as_in_redis(self, ours: Raw, real: Raw, pattern: str, name: str) -> None:
        for server in (ours, real):
            server("FLUSHDB")
            server("SET", name, "v")
        found = [server("SCAN", "0", "COUNT", 10, "MATCH", pattern)[1] for server in (ours, real)]
        assert found[0] == found[1]

    def test_a_pattern_that_is_longer_than_any_use_of_it_is_refused(self, ours: Raw) -> None:
        assert ours("SCAN", 0, "MATCH", "?" * 1024) == [b"0", []]
        assert ours("SCAN", 0, "MATCH", "?" * 1025) == "ResponseError: a pattern may have 1024 bytes"

    def test_a_pattern_is_not_much_longer_as_an_expression(self) -> None:
        pattern = _glob(b"[\0-\xff]" * 200)
        assert len(pattern.pattern) < 4096
        assert pattern.fullmatch(bytes(range(200)))

    def test_no_pattern_takes_for_ever(self) -> None:
        assert not _glob(b"*a" * 200 + b"b").fullmatch(b"a" * 512)  # one that goes back would not end in a lifetime


def test_redis_benchmark_runs_without_an_error(store: StoreServer) -> None:
    binary = shutil.which("redis-benchmark")
    if binary is None:
        pytest.skip("redis-benchmark is not installed")
    command = [binary, "-p", str(store.addresses[0].port), "-t", "set,get,ping,mset", "-n", "500", "-c", "5", "-P", "4"]
    done = subprocess.run([*command, "-q"], capture_output=True, text=True, timeout=6 * SECONDS, check=True)
    said = done.stdout + done.stderr
    assert "rror" not in said.replace("WARNING: Could not fetch server CONFIG", "")
    for test in ("PING_MBULK", "SET", "GET", "MSET"):
        assert f"{test}" in said


def test_nothing_is_left_of_a_value_that_is_refused(ours: Raw, store: StoreServer, tmp_path: Path) -> None:
    assert ours("SET", "k", bytes(5 * MIB)).startswith("ResponseError: string exceeds maximum allowed size")
    assert ours("SET", "k", bytes(MIB), "SOON") == "ResponseError: syntax error"
    assert ours("SET", "k" * 513, "v").startswith("ResponseError: key of 513 bytes")
    assert ours("SET", b"\0KVK", "v") == "ResponseError: a key may not begin like packed keys"
    assert ours("GET", "k") is None
    assert store.store.table.stats().used_bytes == 0
