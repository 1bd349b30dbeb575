"""`kvhearth store`: the table of its verbs, each in a module of its own."""

from __future__ import annotations

import typer

from kvhearth.cli.store_ask import ping, stats
from kvhearth.cli.store_bench import bench
from kvhearth.cli.store_content import drop, ls
from kvhearth.cli.store_files import fsck, passwd
from kvhearth.cli.store_policies import policies
from kvhearth.cli.store_serve import EXAMPLES, serve

app = typer.Typer(help="The shared KV store.", no_args_is_help=True)

app.command(epilog=EXAMPLES)(serve)
for _verb in (ping, stats, ls, drop, fsck, bench, policies, passwd):
    app.command()(_verb)
