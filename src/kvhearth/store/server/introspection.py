"""The commands by which clients get to know a server and say who they are: HELLO, AUTH, CLIENT, COMMAND, INFO."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvhearth.store.server.session import Session

if TYPE_CHECKING:
    from kvhearth.store.server.commands import Command

REDIS_VERSION = "7.0.0"
"""The Redis whose behaviour the commands follow; some clients choose their dialect by it."""

_NAME_BYTES = 128


def hello(session: Session, args: list[bytes]) -> None:
    replies = session.replies
    if args and args[0] not in (b"2", b"3"):
        bad = not args[0].isdigit()
        replies.error(
            "ERR Protocol version is not an integer or out of range" if bad else "NOPROTO unsupported protocol version"
        )
        return
    name = None
    rest = list(args[1:])
    while rest:
        option = rest.pop(0).upper()
        if option == b"AUTH" and len(rest) >= 2:
            if not _try_password(session, rest.pop(0), rest.pop(0)):
                return
        elif option == b"SETNAME" and rest:
            name = rest.pop(0)
        else:
            replies.error(f"ERR Syntax error in HELLO option '{printable(option[:64])}'")
            return
    if not session.authenticated:
        replies.error(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH "
            "<user> <pass> option can be used to authenticate the client and select the RESP protocol version at the "
            "same time"
        )
        return
    if name is not None and not _set_name(session, name):
        return
    if args:
        replies.resp3 = args[0] == b"3"
    replies.map(7)
    for field, value in (("server", "redis"), ("version", REDIS_VERSION)):
        replies.bulk(field)
        replies.bulk(value)
    replies.bulk("proto")
    replies.integer(3 if replies.resp3 else 2)
    replies.bulk("id")
    replies.integer(session.client_id)
    for field, value in (("mode", "standalone"), ("role", "master")):
        replies.bulk(field)
        replies.bulk(value)
    replies.bulk("modules")
    replies.array(0)


def auth(session: Session, args: list[bytes]) -> None:
    if len(args) > 2:
        session.replies.error("ERR syntax error")
    elif session.users is None and len(args) == 1:
        session.replies.error(
            "ERR AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    elif _try_password(session, args[0] if len(args) == 2 else b"default", args[-1]):
        session.replies.ok()


def client(session: Session, args: list[bytes]) -> None:
    replies = session.replies
    match args[0].upper(), args[1:]:
        case b"ID", []:
            replies.integer(session.client_id)
        case b"INFO", []:
            replies.bulk(_describe(session))
        case b"GETNAME", []:
            if session.name:
                replies.bulk(session.name)
            else:
                replies.null()
        case b"SETNAME", [name]:
            if _set_name(session, name):
                replies.ok()
        case b"SETINFO", [attribute, value]:
            _set_info(session, attribute, value)
        case subcommand, _:
            _unknown_subcommand(session, subcommand)


def command(session: Session, args: list[bytes], commands: Mapping[bytes, Command]) -> None:
    replies = session.replies
    chosen = [commands.get(name.upper()) for name in args[1:]]
    match args[0].upper() if args else b"INFO":
        case b"COUNT" if len(args) == 1:
            replies.integer(len(commands))
        case b"INFO":
            wanted = chosen or list(commands.values())
            replies.array(len(wanted))
            for entry in wanted:
                _describe_command(session, entry)
        case b"DOCS":
            found = [entry for entry in chosen if entry is not None] if chosen else list(commands.values())
            replies.map(len(found))
            for entry in found:
                replies.bulk(entry.name)
                replies.map(3)
                for text in ("summary", entry.summary, "since", "1.0.0", "group", "generic"):
                    replies.bulk(text)
        case subcommand:
            _unknown_subcommand(session, subcommand)


def config(session: Session, args: list[bytes]) -> None:
    replies = session.replies
    if args[0].upper() != b"GET" or len(args) < 2:
        replies.error("ERR CONFIG GET is all there is: settings are given when the store is started")
        return
    known = {
        "maxmemory": str(session.config.capacity_bytes),
        "maxmemory-policy": session.config.policy,
        "maxclients": str(session.config.max_connections),
        "timeout": str(int(session.config.idle_timeout_seconds)),
        "proto-max-bulk-len": str(session.config.value_limit_bytes),
        "save": "",
        "appendonly": "no",
        "databases": "1",
    }
    # Not by `fnmatchcase`, which keeps tens of thousands of patterns.
    patterns = [re.compile(fnmatch.translate(printable(arg).lower())) for arg in args[1:] if len(arg) <= _NAME_BYTES]
    found = [name for name in known if any(pattern.match(name) for pattern in patterns)]
    replies.map(len(found))
    for name in found:
        replies.bulk(name)
        replies.bulk(known[name])


def info(session: Session, args: list[bytes]) -> None:
    wanted = {printable(arg).lower() for arg in args}
    everything = not wanted or bool(wanted & {"all", "default", "everything"})
    sections = session.figures.info()
    if not session.sees_everything:
        sections = {title: lines for title, lines in sections.items() if title not in ("Namespaces", "Groups")}
    text = "\r\n".join(
        f"# {title}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in lines.items())
        for title, lines in sections.items()
        if everything or title.lower() in wanted
    )
    session.replies.bulk(text)


def printable(raw: bytes) -> str:
    """``raw`` for an error line."""
    return raw.decode("utf-8", "backslashreplace")


def _unknown_subcommand(session: Session, subcommand: bytes) -> None:
    session.replies.error(f"ERR unknown subcommand or wrong number of arguments for '{printable(subcommand[:64])}'")


def _try_password(session: Session, user: bytes, password: bytes) -> bool:
    # As Redis: the default user without a password takes any.
    if user == b"default" if session.users is None else session.authenticate(user, password):
        return True
    session.replies.error("WRONGPASS invalid username-password pair or user is disabled.")
    return False


def _set_name(session: Session, name: bytes) -> bool:
    if len(name) > _NAME_BYTES or any(not 33 <= byte <= 126 for byte in name):
        session.replies.error("ERR Client names cannot contain spaces, newlines or special characters.")
        return False
    session.name = name.decode("ascii")
    return True


def _set_info(session: Session, attribute: bytes, value: bytes) -> None:
    if len(value) > _NAME_BYTES or any(not 33 <= byte <= 126 for byte in value):
        session.replies.error(f"ERR {printable(attribute[:64])} cannot contain spaces, newlines or special characters.")
        return
    match attribute.upper():
        case b"LIB-NAME":
            session.library = value.decode("ascii")
        case b"LIB-VER":
            session.library_version = value.decode("ascii")
        case _:
            session.replies.error(f"ERR Unrecognized option '{printable(attribute[:64])}'")
            return
    session.replies.ok()


def _describe(session: Session) -> str:
    return (
        f"id={session.client_id} addr={session.peer} name={session.name} db=0 resp={3 if session.replies.resp3 else 2} "
        f"lib-name={session.library} lib-ver={session.library_version}\n"
    )


def _describe_command(session: Session, entry: Command | None) -> None:
    replies = session.replies
    if entry is None:
        replies.null()
        return
    replies.array(10)
    replies.bulk(entry.name)
    replies.integer(entry.arity)
    replies.array(len(entry.flags))
    for flag in entry.flags:
        replies.simple(flag)
    for position in entry.keys:
        replies.integer(position)
    for _ in ("ACL categories", "tips", "key specifications", "subcommands"):
        replies.array(0)
