"""The command line's entry: the table of verbs, and how each kind of failure ends the process. No verb's own logic."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer

from kvhearth import __version__
from kvhearth.cli import console
from kvhearth.errors import UserError


class Verb(NamedTuple):
    """A verb: where its function or typer app lives, its line in the help, and what must be installed for it."""

    target: str
    help: str
    extra: str = ""
    needs: tuple[str, ...] = ()


_HTTP = ("httptools", "uvloop")
_EMULATOR = (*_HTTP, "msgspec", "starlette", "uvicorn")
_ALL = (*_EMULATOR, "aiohttp", "matplotlib")

VERBS: dict[str, Verb] = {
    "demo": Verb("kvhearth.cli.demo:demo", "Show what offloading saves, measured and predicted.", "all", _ALL),
    "simulate": Verb("kvhearth.cli.simulate:simulate", "Play a workload in virtual time.", "planner", ("matplotlib",)),
    "up": Verb("kvhearth.cli.up:up", "Run a whole stack on this machine.", "all", _EMULATOR),
    "engine-args": Verb("kvhearth.cli.engine_args:engine_args", "Print the vLLM command of a Stack's real engines."),
    "warm": Verb("kvhearth.cli.warm:warm", "Prefill and pin prompts that many requests begin with."),
    "store": Verb("kvhearth.cli.store:app", "The shared KV store.", "store"),
    "router": Verb("kvhearth.cli.router:app", "The OpenAI-compatible router.", "router", _HTTP),
    "emulator": Verb(
        "kvhearth.cli.emulator:app", "A vLLM-compatible engine without GPU or weights.", "emulator", _EMULATOR
    ),
}
"""Every verb, in the order of the help."""

_HELP = """Keep KV cache warm outside HBM for vLLM: decide, run and show.

**Examples**

- `kvhearth up examples/local.yaml`: four emulated engines, a router and a store on this machine

- `kvhearth store serve --listen 127.0.0.1:6380 --capacity 4GiB`: a store that redis-cli can talk to

- `kvhearth up --help`: what a verb takes
"""

_USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
"""The base of "wrong arguments": click's UsageError, of which recent versions of typer carry a copy of their own."""


_INTERRUPTED = 130
"""Exit code of a process that SIGINT ended, as shells give it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 1 (a bug), 2 (wrong input) or 130 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.exit(run(args or ["--help"]))


def run(args: list[str]) -> int:
    """Run one command line and return its exit code; every failure is one line on stderr."""
    debug = "--debug" in args[: _verb_position(args)]
    try:
        code = _app(args)(args, prog_name="kvhearth", standalone_mode=False)
        if code == _INTERRUPTED:  # typer turns Ctrl-C into this, or lets it through, by version
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except UserError as wrong:
        return _fail(str(wrong), 2, debug)
    except (KeyboardInterrupt, typer.Abort):
        console.err.print("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit stays quiet
        return 141
    except _USAGE_ERROR as wrong:
        return _usage(wrong, debug)
    except Exception as bug:
        hint = "" if debug else "; run it again as `kvhearth --debug …` for a traceback, and please report it"
        return _fail(f"this is a bug: {type(bug).__name__}: {bug}{hint}", 1, debug)


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        console.err.print_exception()
    console.error(message)
    return code


def _usage(wrong: Any, debug: bool) -> int:
    if type(wrong).__name__ == "NoArgsIsHelpError":  # carries the help page, not a message
        wrong.show()
        return 2
    path = wrong.ctx.command_path if wrong.ctx is not None else "kvhearth"
    return _fail(f"{wrong.format_message().rstrip('.')}; see `{path} --help`", 2, debug)


def _verb_position(args: Sequence[str]) -> int:
    """Index of the verb: the options before it are all flags, so it is the first argument without a dash."""
    return next((i for i, arg in enumerate(args) if not arg.startswith("-")), len(args))


def _app(args: Sequence[str]) -> typer.Typer:
    """The typer app for one command line: the verb asked for is imported, the others only lend their line of help."""
    app = typer.Typer(
        help=_HELP, rich_markup_mode="markdown", pretty_exceptions_enable=False, add_completion=False, callback=_options
    )
    position = _verb_position(args)
    asked = args[position] if position < len(args) else ""
    for name, verb in VERBS.items():
        target = _load(name, verb) if name == asked else _not_loaded
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name, help=verb.help)
        else:
            app.command(name, help=None if name == asked else verb.help, short_help=verb.help)(target)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvhearth {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Options before the verb; ``--debug`` is read by `run`, which must know it before anything can fail."""


def _not_loaded() -> None:
    raise AssertionError("a verb that was not asked for")


def _load(name: str, verb: Verb) -> Any:
    remedy = f"pip install 'kvhearth[{verb.extra}]'" if verb.extra else "install kvhearth again"
    for module in verb.needs:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"`kvhearth {name}` needs {module}, which is not installed", remedy=remedy)
    module_name, _, attribute = verb.target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "kvhearth":
            raise
        raise UserError(f"`kvhearth {name}` needs {missing.name}, which is not installed", remedy=remedy) from missing
