"""The commands there are and how one is run: who may, with how many arguments, and which module does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvhearth.store.protocol.resp import MAX_ARG_BYTES, MAX_BULK_BYTES
from kvhearth.store.server import chunks, feed, keyspace, sharing
from kvhearth.store.server import introspection as intro
from kvhearth.store.server.session import Session

Handler = Callable[[Session, list[bytes]], None]
Receiver = Callable[[Session, int], None]

NOAUTH = "NOAUTH Authentication required."


class Command(NamedTuple):
    """A command's entry. ``arity`` counts the name; negative means "at least", as in Redis."""

    name: str
    handler: Handler | None
    arity: int
    right: str
    """``read``, ``write`` or ``admin``; empty: every client that has logged in."""
    keys: tuple[int, int, int]
    """First key, last key (-1: to the end), step; zeros for none."""
    summary: str
    receiver: Receiver | None = None
    """In place of ``handler``: takes its arguments from the connection itself, given how many there are with the name.
    It looks itself whether the keys are the user's."""
    before_auth: bool = False
    while_following: bool = False
    """Whether it may be sent on a connection that carries events."""

    def accepts(self, count: int) -> bool:
        """Whether ``count`` arguments, name included, are right."""
        return count == self.arity if self.arity >= 0 else count >= -self.arity

    def keys_in(self, args: list[bytes]) -> list[bytes]:
        """The keys among the arguments after the name."""
        first, last, step = self.keys
        if not first:
            return []
        return args[first - 1 : len(args) if last < 0 else last : step]

    @property
    def flags(self) -> tuple[str, ...]:
        """As COMMAND INFO tells them."""
        kind = {"read": ("readonly",), "write": ("write",), "admin": ("admin", "dangerous")}.get(self.right, ("fast",))
        return (*kind, "no_auth") if self.before_auth else kind


def ping(session: Session, args: list[bytes]) -> None:
    if len(args) > 1:
        session.replies.error("ERR wrong number of arguments for 'ping' command")
    elif session.feed is not None and not session.replies.resp3:  # as Redis: everything is an array here
        session.replies.array(2)
        session.replies.bulk("pong")
        session.replies.bulk(args[0] if args else b"")
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
        session.replies.error(keyspace.NOT_A_NUMBER)
    elif int(args[0][:9]) != 0:
        session.replies.error("ERR DB index is out of range")
    else:
        session.replies.ok()


def command(session: Session, args: list[bytes]) -> None:
    intro.command(session, args, COMMANDS)


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
    session.refresh_user()
    if not session.authenticated and (entry is None or not entry.before_auth):
        session.replies.error(NOAUTH)
        _skip(session, count, MAX_ARG_BYTES)
    elif entry is None:
        unknown_command(session, name, session.reader.args(count - 1))
    elif refusal := _refusal(session, entry, count):
        session.replies.error(refusal)
        _skip(session, count, MAX_BULK_BYTES)
    elif entry.receiver is not None:
        entry.receiver(session, count)
    elif entry.handler is not None:
        args = session.reader.args(count - 1)
        if session.may_use_all(entry.keys_in(args)):
            entry.handler(session, args)
        else:
            session.replies.error(session.no_key)
    return entry.name if entry is not None else "unknown"


def _refusal(session: Session, entry: Command, count: int) -> str:
    if session.user is not None and not session.may(entry.right):
        return f"NOPERM User {session.user.name} has no permissions to run the '{entry.name}' command"
    if not entry.accepts(count) or (entry.keys[2] == 2 and count % 2 == 0):
        return f"ERR wrong number of arguments for '{entry.name}' command"
    if session.feed is not None and not entry.while_following:
        return f"ERR Can't execute '{entry.name}': only (UN)SUBSCRIBE / PING / QUIT are allowed in this context"
    return ""


def _skip(session: Session, count: int, limit: int) -> None:
    for _ in range(count - 1):
        session.reader.discard(session.reader.bulk_length(limit))


def _entries() -> tuple[Command, ...]:
    one, all_, none = (1, 1, 1), (1, -1, 1), (0, 0, 0)
    return (
        Command("auth", intro.auth, -2, "", none, "Authenticates the connection.", before_auth=True),
        Command("client", intro.client, -2, "", none, "Names and describes the connection."),
        Command("command", command, -1, "", none, "Describes the commands."),
        Command("config", intro.config, -2, "read", none, "Tells settings (GET)."),
        Command("dbsize", keyspace.dbsize, 1, "read", none, "Returns the number of values."),
        Command("del", keyspace.delete, -2, "write", all_, "Deletes keys."),
        Command("echo", echo, 2, "", none, "Returns the given string."),
        Command("exists", keyspace.exists, -2, "read", all_, "Counts the keys that are present."),
        Command("expire", keyspace.expire, 3, "write", one, "Gives a value so many seconds to live."),
        Command("flushall", keyspace.flushdb, -1, "admin", none, "Drops every value."),
        Command("flushdb", keyspace.flushdb, -1, "admin", none, "Drops every value."),
        Command("get", keyspace.get, 2, "read", one, "Returns the value of a key."),
        Command("hello", intro.hello, -1, "", none, "Shakes hands, RESP2 or RESP3.", before_auth=True),
        Command("info", intro.info, -1, "", none, "Returns figures of the server."),
        Command("kv.abandon", sharing.abandon, 2, "", none, "Gives up uploads in shared memory."),
        Command("kv.attach", sharing.attach, 1, "", none, "Hands over the memory to clients of the same user."),
        Command("kv.commit", sharing.commit, 2, "write", none, "Publishes uploads in shared memory."),
        Command("kv.events", feed.events, -1, "read", none, "Follows what is put and what goes."),
        Command("kv.exists", None, -2, "read", all_, "Tells the tier of each key.", chunks.exists),
        Command("kv.lease", None, -2, "read", all_, "Tells where values lie in shared memory.", sharing.lease),
        Command("kv.match", None, -2, "read", all_, "Tells the tier of each leading key present.", chunks.match),
        Command("kv.mget", None, -2, "read", all_, "Returns the values of keys.", chunks.mget),
        Command("kv.mput", None, -3, "write", (1, -1, 2), "Sets values, each with its answer.", chunks.mput),
        Command("kv.pin", None, -3, "write", (2, -1, 1), "Keeps values from eviction for seconds.", chunks.pin),
        Command("kv.prefetch", None, -2, "read", all_, "Lifts values into DRAM.", chunks.prefetch),
        Command("kv.release", sharing.release, 2, "", none, "Ends leases in shared memory."),
        Command("kv.reserve", None, -3, "write", (2, -1, 1), "Makes room in shared memory.", sharing.reserve),
        Command("kv.stats", chunks.stats, 1, "", none, "Returns every figure as JSON."),
        Command("kv.unpin", None, -2, "write", all_, "Lets pinned values be evicted again.", chunks.unpin),
        Command("memory", keyspace.memory, -2, "read", (2, 2, 1), "Tells what a value takes (USAGE)."),
        Command("mget", keyspace.mget, -2, "read", all_, "Returns the values of keys."),
        Command("mset", None, -3, "write", (1, -1, 2), "Sets the values of keys.", keyspace.mset),
        Command("ping", ping, -1, "", none, "Returns PONG, or the given string.", while_following=True),
        Command("pttl", keyspace.pttl, 2, "read", one, "Tells a value's life in milliseconds."),
        Command("quit", quit_, -1, "", none, "Closes the connection.", before_auth=True, while_following=True),
        Command("scan", keyspace.scan, -2, "read", none, "Lists keys, some at a time."),
        Command("select", select, 2, "", none, "Accepts database 0, the only one."),
        Command("set", None, -3, "write", one, "Sets the value of a key.", keyspace.set_value),
        Command("strlen", keyspace.strlen, 2, "read", one, "Returns the length of a value."),
        Command("subscribe", feed.subscribe, -2, "read", none, "Follows channels of events.", while_following=True),
        Command("touch", keyspace.touch, -2, "read", all_, "Counts the keys present and marks them as used."),
        Command("ttl", keyspace.ttl, 2, "read", one, "Tells a value's life in seconds."),
        Command("unlink", keyspace.delete, -2, "write", all_, "Deletes keys."),
        Command("unsubscribe", feed.unsubscribe, -1, "", none, "Follows channels no more.", while_following=True),
    )


COMMANDS: dict[bytes, Command] = {entry.name.upper().encode(): entry for entry in _entries()}
