"""``kvhearth warm``: prefill and pin prompts. `control.warm` does it; this shows progress and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kvhearth.cli import console
from kvhearth.cli.secrets import ROUTER_KEY_VARIABLE, read_secret
from kvhearth.control.warm import Target, Warmed, check_url, read_prompts
from kvhearth.control.warm import warm as warm_all


def warm(
    file: Annotated[Path, typer.Argument(metavar="PROMPTS.YAML", help="A list of prompts; see below.")],
    url: Annotated[list[str], typer.Option(help="http://host:port of an engine or a router. Repeatable.")],
    model: Annotated[str | None, typer.Option(help="Model to ask for; by default the first that is served.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help=f"File with the API key to send; or set {ROUTER_KEY_VARIABLE}.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="For each prompt.")] = 600.0,
) -> None:
    """Prefill prompts that many requests begin with, and pin their KV, so that the first user finds it warm.

    Each prompt of the file goes once to each address. A router sends it to one of its engines; give the engines' own
    addresses to warm them all (with a shared store, one is enough for the store).

    The file is a list: `- {name: support, prompt: "You are …"}`, or `messages: [{role: system, content: …}]` in place
    of `prompt`; `cache_salt` for a sharing group of its own, `pin: false` to prefill only.

    Exit code 1 when a prompt failed.

    **Examples**

    - `kvhearth warm examples/warm/prompts.yaml --url http://127.0.0.1:8000`

    - `kvhearth warm prompts.yaml --url http://10.0.0.1:8000 --url http://10.0.0.2:8000 --api-key-file key`
    """
    prompts = read_prompts(file)
    key = read_secret(api_key_file, ROUTER_KEY_VARIABLE, option="--api-key-file")
    urls = list(dict.fromkeys(check_url(each) for each in url))
    with console.progress(percent=False) as bar:
        task = bar.add_task("warming", total=len(prompts) * len(urls))
        results = warm_all(
            prompts, [Target(each, model, key, timeout_seconds) for each in urls], lambda done: bar.advance(task)
        )
    _show(results, several=len(urls) > 1)
    if any(done.error is not None for done in results):
        raise typer.Exit(1)


def _show(results: list[Warmed], *, several: bool) -> None:
    columns = ["name", *(["address"] if several else []), "prompt tokens", "cached before", "seconds", "result"]
    table = console.table(*columns, right=("prompt tokens", "cached before", "seconds"))
    for done in results:
        table.add_row(
            escape(done.name),
            *([escape(done.url)] if several else []),
            _count(done.prompt_tokens),
            _count(done.cached_tokens),
            f"{done.seconds:.2f}",
            "ok" if done.error is None else f"[red]{escape(done.error)}[/]",
        )
    console.out.print(table)


def _count(tokens: int | None) -> str:
    return "–" if tokens is None else f"{tokens:,}"
