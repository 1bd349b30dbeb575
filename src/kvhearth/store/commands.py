"""The commands that clients send: what each does to the table and answers. SET, whose value is received straight into
the pool, is `set_value`; the rest take their arguments whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvhearth.store import introspection as intro
from kvhearth.store.config import MAX_KEY_BYTES
from kvhearth.store.header import group_of
from kvhearth.store.resp import MAX_ARG_BYTES
from kvhearth.store.session import Session

Handler = Callable[[Session, list[bytes]], None]

NOAUTH = "NOAUTH Authentication required."


class Command(NamedTuple):
    """A command's entry. ``arity`` counts the name; negative means "at least", as in Redis."""

    name: str
    handler: Handler
    arity: int
    flags: tuple[str, ...]
    keys: tuple[int, int, int]
    """First key, last key (-1: to the end), step; zeros for none."""
    summary: str
    before_auth: bool = False

    def accepts(self, count: int) -> bool:
        """Whether ``count`` arguments, name included, are right."""
        return count == self.arity if self.arity >= 0 else count >= -self.arity


def ping(session: Session, args: list[bytes]) -> None:
    if len(args) > 1:
        wrong_arity(session, "ping")
    elif args:
        session.replies.bulk(args[0])
    else:
        session.replies.simple("PONG")


def echo(session: Session, args: list[bytes]) -> None:
    session.replies.bulk(args[0])


def quit_(session: Session, _args: list[bytes]) -> None:
    session.replies.ok()
    session.closing = True


def select(session: Session, args: list[bytes]) -> None:
    if not args[0].isdigit():
        session.replies.error("ERR value is not an integer or out of range")
    elif int(args[0][:9]) != 0:
        session.replies.error("ERR DB index is out of range")
    else:
        session.replies.ok()


def get(session: Session, args: list[bytes]) -> None:
    _reply_value(session, args[0])


def mget(session: Session, args: list[bytes]) -> None:
    # Leased one by one as they are sent: a long MGET pins little memory, and is not a snapshot.
    session.replies.array(len(args))
    for key in args:
        _reply_value(session, key)


def exists(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.table.exists(args))


def delete(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.table.delete(args))


def strlen(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.table.length(args[0]))


def match(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.table.match(args))


def present(session: Session, args: list[bytes]) -> None:
    found = session.table.present(args)
    session.replies.array(len(found))
    for there in found:
        session.replies.integer(there)


def pin(session: Session, args: list[bytes]) -> None:
    table = session.table
    pinned = table.pin(args)
    if pinned is None:
        session.replies.error(
            f"ERR pins take at most half of this store, {table.max_pinned_bytes} bytes and "
            f"{table.max_pinned_items} values: unpin others first"
        )
    else:
        session.replies.integer(pinned)


def unpin(session: Session, args: list[bytes]) -> None:
    session.replies.integer(session.table.unpin(args))


def dbsize(session: Session, _args: list[bytes]) -> None:
    session.replies.integer(len(session.table))


def flushdb(session: Session, args: list[bytes]) -> None:
    if args and (len(args) > 1 or args[0].upper() not in (b"SYNC", b"ASYNC")):
        session.replies.error("ERR syntax error")
        return
    session.table.clear()
    session.replies.ok()


def command(session: Session, args: list[bytes]) -> None:
    intro.command(session, args, COMMANDS)


def set_value(session: Session, count: int) -> None:
    """SET with ``count`` arguments, its name already read: the value goes from the socket into the pool, and under
    its key once it is all there. Whatever is refused is still read to its end, so that a pipeline goes on.

    Raises:
        ProtocolError, ConnectionGone: nothing is stored.
    """
    reader, table = session.reader, session.table
    key = reader.arg()
    nbytes = reader.bulk_length()
    refusal = _refusal_of_set(session, key, nbytes, count)
    entry = None if refusal else table.reserve(nbytes)
    if entry is None:
        reader.discard(nbytes)
        reader.args(count - 3)
        session.replies.error(refusal or "OOM command not allowed when used memory > 'maxmemory'.")
        return
    views = table.views(entry)
    try:
        reader.payload_into(views)
    except BaseException:
        table.abandon(entry)
        raise
    if table.publish(key, entry, group_of(views[0] if views else b"")):
        session.replies.ok()
    else:
        session.replies.error("OOM command not allowed when used memory > 'maxmemory'.")


def _refusal_of_set(session: Session, key: bytes, nbytes: int, count: int) -> str:
    limit = session.config.value_limit_bytes
    if count > 3:
        return "ERR syntax error"
    if len(key) > MAX_KEY_BYTES:
        return f"ERR key of {len(key)} bytes is longer than {MAX_KEY_BYTES}"
    if nbytes > limit:
        return f"ERR string exceeds maximum allowed size: {nbytes} bytes, this store keeps up to {limit}"
    return ""


def _reply_value(session: Session, key: bytes) -> None:
    entry = session.table.lease(key)
    if entry is None:
        session.counts.misses += 1
        session.replies.null()
        return
    session.counts.hits += 1
    table = session.table
    session.replies.value(table.views(entry), entry.nbytes, lambda: table.release(entry))


def wrong_arity(session: Session, name: str) -> None:
    """Redis's answer to too few or too many arguments."""
    session.replies.error(f"ERR wrong number of arguments for '{name}' command")


def unknown_command(session: Session, name: bytes, args: list[bytes]) -> None:
    """Redis's answer to a command that there is not."""
    beginning = ""
    for arg in args:
        if len(beginning) > 128:
            break
        beginning += f"'{intro.printable(arg[:128])}' "
    session.replies.error(f"ERR unknown command '{intro.printable(name[:128])}', with args beginning with: {beginning}")


def run(session: Session, count: int) -> str:
    """Read and answer one command of ``count`` arguments; its name for the counters.

    Raises:
        ProtocolError, ConnectionGone: the connection cannot go on.
    """
    name = session.reader.arg()
    entry = COMMANDS.get(name.upper())
    if entry is not None and not session.authenticated and not entry.before_auth:
        _refuse_unauthenticated(session, count)
        return entry.name
    if entry is _SET and entry.accepts(count):
        set_value(session, count)
        return entry.name
    if entry is None and not session.authenticated:
        _refuse_unauthenticated(session, count)
        return "unknown"
    args = session.reader.args(count - 1)
    if entry is None:
        unknown_command(session, name, args)
        return "unknown"
    if entry.accepts(count):
        entry.handler(session, args)
    else:
        wrong_arity(session, entry.name)
    return entry.name


def _refuse_unauthenticated(session: Session, count: int) -> None:
    session.replies.error(NOAUTH)
    for _ in range(count - 1):
        session.reader.discard(session.reader.bulk_length(MAX_ARG_BYTES))


def _set_without_value(session: Session, _args: list[bytes]) -> None:
    raise RuntimeError("SET is handled where its value arrives")


_SET = Command("set", _set_without_value, -3, ("write", "denyoom"), (1, 1, 1), "Sets the value of a key.")

COMMANDS: dict[bytes, Command] = {
    entry.name.upper().encode(): entry
    for entry in (
        _SET,
        Command("auth", intro.auth, -2, ("fast", "no_auth"), (0, 0, 0), "Authenticates the connection.", True),
        Command("client", intro.client, -2, ("fast",), (0, 0, 0), "Names and describes the connection."),
        Command("command", command, -1, ("loading",), (0, 0, 0), "Describes the commands."),
        Command("dbsize", dbsize, 1, ("readonly", "fast"), (0, 0, 0), "Returns the number of values."),
        Command("del", delete, -2, ("write",), (1, -1, 1), "Deletes keys."),
        Command("echo", echo, 2, ("fast",), (0, 0, 0), "Returns the given string."),
        Command("exists", exists, -2, ("readonly", "fast"), (1, -1, 1), "Counts the keys that are present."),
        Command("flushall", flushdb, -1, ("write",), (0, 0, 0), "Drops every value."),
        Command("flushdb", flushdb, -1, ("write",), (0, 0, 0), "Drops every value."),
        Command("get", get, 2, ("readonly", "fast"), (1, 1, 1), "Returns the value of a key."),
        Command("hello", intro.hello, -1, ("fast", "no_auth"), (0, 0, 0), "Shakes hands, RESP2 or RESP3.", True),
        Command("info", intro.info, -1, ("loading",), (0, 0, 0), "Returns figures of the server."),
        Command(
            "kv.exists", present, -2, ("readonly",), (1, -1, 1), "Says of each key whether it is there; touches it."
        ),
        Command("kv.match", match, -2, ("readonly",), (1, -1, 1), "Counts and touches the leading keys present."),
        Command("kv.pin", pin, -2, ("write", "fast"), (1, -1, 1), "Keeps values from eviction."),
        Command("kv.unpin", unpin, -2, ("write", "fast"), (1, -1, 1), "Lets pinned values be evicted again."),
        Command("mget", mget, -2, ("readonly", "fast"), (1, -1, 1), "Returns the values of keys."),
        Command("ping", ping, -1, ("fast",), (0, 0, 0), "Returns PONG, or the given string."),
        Command("quit", quit_, -1, ("fast", "no_auth"), (0, 0, 0), "Closes the connection.", True),
        Command("select", select, 2, ("fast",), (0, 0, 0), "Accepts database 0, the only one."),
        Command("strlen", strlen, 2, ("readonly", "fast"), (1, 1, 1), "Returns the length of a value."),
    )
}
