"""``kvhearth up``: run a Stack file until Ctrl-C. `control` does the work; this waits and prints."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kvhearth.cli import console
from kvhearth.control import Event, LocalStack
from kvhearth.stack import Stack

_POLL_SECONDS = 0.1


def up(
    file: Annotated[Path, typer.Argument(metavar="STACK.YAML", help="The Stack file, such as examples/local.yaml.")],
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep the logs here; by default they go when the stack goes.")
    ] = None,
) -> None:
    """Run a whole stack on this machine: store, engines and router, each a process that is restarted when it dies.

    Ctrl-C (or SIGTERM, SIGHUP) stops everything in order; a second one kills. Nothing is left behind.

    **Examples**

    - `kvhearth up examples/local.yaml`

    - `kvhearth up examples/minimal.yaml --log-dir logs`
    """
    stack = Stack.from_yaml(file)
    for warning in stack.warnings():
        console.warn(f"{file}: {warning}")
    with _signals() as received:
        running = LocalStack(stack, log_dir, where=str(file), on_event=_tell)
        try:
            running.start()
            if not console.err.is_terminal and any(pool.engine == "vllm" for pool in stack.pools):  # no bar there
                console.err.print("starting vLLM, which takes a minute or more …")
            with console.progress(percent=False) as bar:
                ready = running.wait_ready(bar, cancelled=lambda: bool(received))
            if ready:
                _show(running)
                while not received and not running.wait_ended(_POLL_SECONDS):
                    pass
            running.request_stop()
            while not running.wait_ended(_POLL_SECONDS):
                if len(received) > 1:
                    running.request_stop(hurry=True)
        finally:
            running.stop()
    console.err.print("stopped")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask for an end, not ended by them; a SIGHUP that nohup ignores stays ignored."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    kinds = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    before = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _tell(event: Event) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone; the stack must not go with it
        console.err.print(f"{time.strftime('%H:%M:%S')} {event.child}: {event.message}", markup=False, soft_wrap=True)
        for line in event.log_lines:
            console.err.print(f"    {line}", markup=False, soft_wrap=True)


def _show(running: LocalStack) -> None:
    """Where everything is, and a first request to try."""
    table = console.table("what", "address", "pid", title=f"stack {running.stack.name}", right=("pid",))
    addresses = {"router": running.router_url, **running.engine_urls}
    store = running.addresses.store
    if store is not None:
        addresses["store"] = "\n".join(filter(None, (store.tcp, running.store_socket, running.metrics_urls["store"])))
    for view in running.children():
        table.add_row(view.name, addresses[view.name], str(view.pid))
    console.out.print(table)
    for line in (
        f"Logs: {running.log_dir}/NAME.log",
        "Metrics: /metrics at each http address",
        f"Try: {_request(running)}",
    ):
        console.out.print(line, markup=False, soft_wrap=True)
    console.out.print("Ctrl-C stops everything.")


def _request(running: LocalStack) -> str:
    """A shell command that completes a prompt with the first pool's model."""
    pool, key_file = running.stack.pools[0], running.stack.router.api_key_file
    body = f'{{"model": "{pool.served_model_name or pool.model}", "prompt": "Hello", "max_tokens": 16}}'
    key = f" -H \"Authorization: Bearer $(cat '{key_file}')\"" if key_file else ""
    return f"curl {running.router_url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
