"""``kvhearth router``: runs the front door, or checks its settings. The flags are made from the table of settings."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from kvhearth.cli import setting_flags
from kvhearth.cli.router_tenants import key, tenants
from kvhearth.router.config import RouterConfig
from kvhearth.router.settings import PANELS, TABLE, as_yaml, config_path, read_router_settings

EXAMPLES = """Every flag can also be set in the environment as KVHEARTH_ROUTER_<GROUP>_<NAME>, or in the file of
--config as <name> below <group>. A flag wins over the environment, and that over the file, which is read again when it
changes. Keys, passwords and tokens are given in the environment or in files of their own, never by a flag.

Examples:

  kvhearth router serve --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --policy prefix

  kvhearth router serve --config router.yaml

  kvhearth router check --config router.yaml
"""

app = typer.Typer(help="OpenAI-compatible front door to several engines.", no_args_is_help=True)


@app.callback()
def router() -> None:
    """OpenAI-compatible front door to several engines."""


def serve(config: Path | None = None, **parameters: Any) -> None:
    """Route requests to engines until SIGTERM or SIGINT."""
    flags = setting_flags.named(TABLE, parameters)

    def reread() -> RouterConfig:
        return read_router_settings(flags, os.environ, config)

    in_force = reread()
    import uvloop

    from kvhearth.router.router import Router

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        served = f"policy {in_force.policy_name}, {len(in_force.engines)} engine(s)"
        typer.echo(f"router ready on http://{shown}:{port}, {served}")
        # What is there now stays, and requests leave no cycles behind: a collector that walks through the KV index
        # every few requests finds nothing and holds them all up.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 100)

    uvloop.run(Router(in_force, reread=reread, config_file=config_path(os.environ, config)).serve(ready))


# typer reads a function's flags off its signature.
serve.__signature__ = setting_flags.signature(TABLE, PANELS)  # type: ignore[attr-defined]
app.command(epilog=EXAMPLES)(serve)


@app.command()
def check(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; else the environment's.")] = None,
) -> None:
    """Check the settings of the file and of the environment, and print those in force as YAML, without secrets."""
    typer.echo(as_yaml(read_router_settings({}, os.environ, config)), nl=False)


app.command()(key)
app.command()(tenants)
