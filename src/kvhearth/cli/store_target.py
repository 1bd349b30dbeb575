"""Which store a verb talks to: the options that say so, the same for every verb, and the client that they make."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvhearth.cli.secrets import STORE_PASSWORD_VARIABLE, read_secret
from kvhearth.errors import UserError
from kvhearth.store.client.admin import Admin
from kvhearth.store.client.client import StoreClient
from kvhearth.store.open import open_store
from kvhearth.store.protocol.tls import TlsSettings
from kvhearth.store.ring.client import StoreRing
from kvhearth.store.server.config import DEFAULT_LISTEN


class Target(NamedTuple):
    """A store, and how to get in."""

    address: str
    timeout_seconds: float
    user: str
    password: str | None
    tls: TlsSettings | None

    def __repr__(self) -> str:
        return f"Target({self.address})"

    def admin(self) -> Admin:
        """One connection for questions about a node's content."""
        return Admin(
            self.address,
            timeout_seconds=self.timeout_seconds,
            user=self.user,
            password=self.password,
            tls=self.tls,
            where="--address",
        )

    def client(self, **settings: Any) -> StoreClient | StoreRing:
        """A client of the node or ring."""
        return open_store(
            self.address,
            timeout_seconds=self.timeout_seconds,
            where="--address",
            user=self.user,
            password=self.password,
            tls=self.tls,
            **settings,
        )


def takes_target(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options that name a store; it gets them as its first argument, a `Target`."""

    @functools.wraps(verb)
    def wrapped(*args: Any, **given: Any) -> None:
        verb(_target(*(given.pop(parameter.name) for parameter in _OPTIONS)), *args, **given)

    own = list(inspect.signature(verb, eval_str=True).parameters.values())[1:]
    positional = [parameter for parameter in own if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = [parameter for parameter in own if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    wrapped.__signature__ = inspect.Signature([*positional, *_OPTIONS, *named])  # type: ignore[attr-defined]
    return wrapped


def no_answer(address: str, reason: str) -> UserError:
    """The error of a verb that got no answer."""
    return UserError(
        f"no answer from {address} ({reason})",
        where="--address",
        remedy="start it with 'kvhearth store serve', or give its address, user and password",
    )


def _target(
    address: str,
    timeout_seconds: float,
    user: str,
    password_file: Path | None,
    tls: bool,
    tls_ca: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    tls_server_name: str | None,
) -> Target:
    password = read_secret(password_file, STORE_PASSWORD_VARIABLE, option="--password-file")
    settings = None
    if tls or tls_ca is not None or tls_certificate is not None or tls_server_name is not None:
        settings = TlsSettings(ca=tls_ca, certificate=tls_certificate, key=tls_key, server_name=tls_server_name)
    return Target(address, timeout_seconds, user, password, settings)


def _option(name: str, kind: Any, default: Any, help_: str, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", help=help_, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_OPTIONS = [
    _option("address", str, DEFAULT_LISTEN, "host:port or unix:/path.", envvar="KVHEARTH_STORE_ADDRESS"),
    _option("timeout_seconds", float, 2.0, "Seconds to wait for an answer.", min=0.001, max=600),
    _option("user", str, "default", "Who to log in as, where a password is given.", envvar="KVHEARTH_STORE_USER"),
    _option(
        "password_file",
        Path | None,
        None,
        f"File holding the password; else the environment's {STORE_PASSWORD_VARIABLE}.",
    ),
    _option("tls", bool, False, "Use TLS, with the system's authorities."),
    _option("tls_ca", Path | None, None, "Use TLS; PEM certificates of the authorities to trust."),
    _option("tls_certificate", Path | None, None, "Use TLS; PEM certificate to show."),
    _option("tls_key", Path | None, None, "PEM key of the certificate to show."),
    _option("tls_server_name", str | None, None, "Use TLS; name in the server's certificate, if not its host."),
]
