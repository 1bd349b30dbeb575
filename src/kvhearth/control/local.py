"""A whole Stack on this machine: ports, private directory and children put together. No signals, no printing, so that
it runs in any thread; `kvhearth up` and the demo are its users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.progress import Progress

from kvhearth.control.backoff import RestartPolicy
from kvhearth.control.gpus import assign_gpus
from kvhearth.control.launch import Addresses, EventAddresses, StoreAddresses, plan, publishes_events, router_url
from kvhearth.control.ports import PortKeeper
from kvhearth.control.rundir import RunDir
from kvhearth.control.supervisor import ChildView, Event, State, Supervisor
from kvhearth.control.vllm_args import SHUTDOWN_SECONDS
from kvhearth.control.vllm_environment import check_environments
from kvhearth.errors import UserError
from kvhearth.stack import Stack, check_catalog
from kvhearth.stack.fields import Address, parse_address

_LOOK_SECONDS = 0.1
_AFTER_DRAIN_SECONDS = 2.0
_AFTER_SHUTDOWN_SECONDS = 20.0
"""For vLLM to end its processes, after what it gives its requests."""


class LocalStack:
    """Runs a Stack's store, engines and router as child processes, from `start` (or ``with``) to `stop`.

    Args:
        stack: what to run.
        where: what errors call the stack, such as its file; by default its name.
        run_dir: where logs go (made if needed, kept afterwards); by default the private directory, gone afterwards.
        on_event: told of deaths and restarts, from the supervisor's thread.
        policy: how restarts are spaced.
        stop_seconds: deadline of each stage's orderly end; at least the router's time to drain, and vLLM's, and a
            little.

    Raises:
        UserError: the stack does not fit the catalog, an environment has no suitable vLLM, or a port that it names is
            taken. Nothing has been started then.
    """

    def __init__(
        self,
        stack: Stack,
        run_dir: Path | None = None,
        *,
        where: str = "",
        on_event: Callable[[Event], None] = lambda event: None,
        policy: RestartPolicy = RestartPolicy(),
        stop_seconds: float = 5.0,
    ) -> None:
        where = where or stack.name
        check_catalog(stack, where=where)
        installed = check_environments(stack, where=where)
        devices = assign_gpus(stack, on_cpu={name for name, found in installed.items() if found.is_cpu}, where=where)
        self.stack = stack
        self._held = ExitStack()
        with ExitStack() as held:
            ports = held.enter_context(PortKeeper())
            private = RunDir()
            held.callback(private.close)
            self.addresses = _take_addresses(stack, ports, private, where)
            self.log_dir = run_dir or private.path
            _make_dir(self.log_dir)
            self._supervisor = Supervisor(
                plan(stack, self.addresses, devices),
                self.log_dir,
                policy=policy,
                stop_seconds=max(stop_seconds, _least_stop_seconds(stack)),
                on_event=on_event,
            )
            self._held = held.pop_all()

    @property
    def router_url(self) -> str:
        """``http://host:port`` of the router, without a path."""
        return router_url(self.addresses)

    @property
    def engine_urls(self) -> dict[str, str]:
        """Engine name → its ``http://host:port``."""
        return {name: f"http://{listen}" for name, listen in self.addresses.engines.items()}

    @property
    def store_address(self) -> str | None:
        """The store's ``host:port``, or ``unix:PATH`` when it has no TCP port; None without a store."""
        store = self.addresses.store
        return (store.tcp or self.store_socket) if store else None

    @property
    def store_socket(self) -> str | None:
        """The store's unix socket as ``unix:PATH``, the nearer way; None without a store."""
        return f"unix:{self.addresses.store.socket}" if self.addresses.store else None

    @property
    def metrics_urls(self) -> dict[str, str]:
        """Child name → its Prometheus page."""
        urls = {**self.engine_urls, "router": self.router_url}
        if self.addresses.store:
            urls["store"] = f"http://{self.addresses.store.metrics}"
        return {name: f"{url}/metrics" for name, url in urls.items()}

    def child(self, name: str) -> ChildView:
        """A child as of now (``store``, ``router`` or an engine's name). Raises KeyError for any other name."""
        return self._supervisor.child(name)

    def children(self) -> list[ChildView]:
        """All children as of now: store, engines, router."""
        return self._supervisor.views()

    def start(self) -> None:
        """Begin to start everything; `wait_ready` waits for it."""
        self._supervisor.start()

    def wait_ready(self, progress: Progress | None = None, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything serves; False when that was called off.

        Args:
            progress: a running display to show it on.
            cancelled: asked several times a second whether to wait on.

        Raises:
            UserError: a child could not be started or was not ready in time; all have been stopped again.
        """
        task = progress.add_task("starting", total=len(self.children())) if progress else None
        try:
            settled = False
            while not settled:
                if cancelled():
                    return False
                settled = self._supervisor.wait_settled(_LOOK_SECONDS)
                if progress is not None and task is not None:
                    views = self.children()
                    missing = [view.name for view in views if view.state is not State.READY]
                    progress.update(task, completed=len(views) - len(missing), description=self._starting(missing))
            return all(view.state is State.READY for view in self.children())
        finally:
            if progress is not None and task is not None:
                progress.remove_task(task)

    def _starting(self, missing: list[str]) -> str:
        """What is being waited for, and that it may take long."""
        slow = any(engine.pool.engine == "vllm" for engine in self.stack.engines() if engine.name in missing)
        return f"starting {', '.join(missing[:4])}" + (" (vLLM takes a minute or more)" if slow else "")

    def wait_ended(self, seconds: float) -> bool:
        """Wait for the end; False when it still runs after so many seconds."""
        return self._supervisor.wait_ended(seconds)

    def request_stop(self, *, hurry: bool = False) -> None:
        """Begin to end everything; returns at once. `stop` is still needed afterwards."""
        self._supervisor.request_stop(hurry=hurry)

    def stop(self, *, hurry: bool = False) -> None:
        """End router, engines and store in that order and remove what they leave; ``hurry`` kills at once."""
        try:
            self._supervisor.stop(hurry=hurry)
        finally:
            self._held.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _take_addresses(stack: Stack, ports: PortKeeper, private: RunDir, name: str) -> Addresses:
    """Choose every port before anything starts; those that the stack names come first."""

    def take(listen: str, field: str) -> str:
        host, port = parse_address(listen)
        return str(Address(host, ports.take(host, port, where=f"{name}: {field}")))

    router = take(stack.router.listen, "router.listen")
    store = None
    if stack.store is not None and stack.store.address is None:
        store = StoreAddresses(
            tcp=take(stack.store.listen, "store.listen") if stack.store.listen is not None else None,
            socket=stack.store.unix or private.socket_path("store.sock"),
            metrics=take("127.0.0.1:0", "store metrics"),
        )
    engines = {engine.name: take("127.0.0.1:0", engine.name) for engine in stack.engines()}
    events = {
        engine.name: EventAddresses(
            f"ipc://{private.socket_path(f'e{number}.zmq')}",
            take("127.0.0.1:0", engine.name),
            take("127.0.0.1:0", engine.name),
        )
        for number, engine in enumerate(stack.engines())
        if publishes_events(stack, engine)
    }
    elsewhere = stack.store.address if stack.store is not None else None
    copies = stack.store.copies if stack.store is not None else 1
    return Addresses(router, engines, store, events, elsewhere, copies)


def _least_stop_seconds(stack: Stack) -> float:
    seconds = stack.router.drain_seconds + _AFTER_DRAIN_SECONDS
    if any(pool.engine == "vllm" for pool in stack.pools):
        seconds = max(seconds, SHUTDOWN_SECONDS + _AFTER_SHUTDOWN_SECONDS)
    return seconds


def _make_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the directory: {error.strerror}",
            where=str(path),
            remedy="give a directory that you may write to",
        ) from None
