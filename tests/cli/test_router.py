"""``kvhearth router``: what its flags mean, what it prints, and how wrong input ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from kvhearth.cli.main import run
from kvhearth.router.config import EventSource, HealthChecks, KvSettings, Limits, RouterConfig, Timeouts
from kvhearth.router.settings import PANELS, TABLE
from kvhearth.routing.policies.prefix import PrefixSettings


class Started:
    """Stands where the router would, and keeps what it was started with."""

    last: Started

    def __init__(self, config: RouterConfig, *, reread: Callable[[], RouterConfig], config_file: Path | None) -> None:
        self.config, self.reread, self.config_file = config, reread, config_file
        Started.last = self

    async def serve(self, ready: Callable[[str, int], None]) -> None:
        ready(self.config.listen_host, 8123)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    module: Any = ModuleType("kvhearth.router.router")
    module.Router = Started
    monkeypatch.setitem(sys.modules, "kvhearth.router.router", module)
    for what in ("collect", "freeze", "set_threshold"):
        monkeypatch.setattr(f"kvhearth.cli.router.gc.{what}", lambda *_: None)
    for setting in TABLE.settings:
        monkeypatch.delenv(str(setting.variable), raising=False)

    def started(*arguments: str) -> Started:
        assert run(["router", "serve", *arguments]) == 0
        return Started.last

    return started


def test_flags_mean_what_they_say(serve: Callable[..., Started], capsys: pytest.CaptureFixture[str]) -> None:
    words = """--listen [::1]:0 --policy kv-aware --engine a=http://h:1 --engine http://h:2 --data-parallel a=2
    --alias x=m --alias y=m --kv-events a=tcp://h:5557 --kv-replay a=tcp://h:5558 --kv-snapshot a=h:9100 --store h:7420
    --tokenizer /models/m --block-size 16 --index-size 64MiB --gpu H100 --cost-model llama --tensor-parallel-size 2
    --session-header x-user --decisions-kept 8 --prefix-max-pieces 9 --prefix-load-factor 1.5
    --max-requests-in-flight 10 --connect-timeout-seconds 1 --first-byte-timeout-seconds 2 --idle-timeout-seconds 3
    --drain-seconds 4 --health-interval-seconds 5"""
    started = serve(*words.split())
    assert started.config == RouterConfig(
        engines=[("a", "http://h:1"), ("h:2", "http://h:2")],
        listen_host="::1",
        listen_port=0,
        policy="kv-aware",
        data_parallel={"a": 2},
        aliases={"x": "m", "y": "m"},
        kv=KvSettings(
            events={"a": EventSource("tcp://h:5557", "tcp://h:5558", "h:9100")},
            tokenizer="/models/m",
            store="h:7420",
            block_tokens=16,
            index_bytes=2**26,
            gpu="H100",
            model="llama",
            tensor_parallel=2,
        ),
        session_header="x-user",
        decisions_kept=8,
        prefix=PrefixSettings(max_pieces=9, load_factor=1.5),
        limits=Limits(max_requests_in_flight=10),
        timeouts=Timeouts(connect_seconds=1, first_byte_seconds=2, idle_seconds=3, drain_seconds=4),
        health=HealthChecks(interval_seconds=5),
    )
    assert capsys.readouterr().out == "router ready on http://[::1]:8123, policy kv-aware, 2 engine(s)\n"


def test_a_secret_can_come_in_a_file_or_in_the_environment(
    serve: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("near\n")
    monkeypatch.setenv("KVHEARTH_ROUTER_API_KEY", "far")
    monkeypatch.setenv("KVHEARTH_SNAPSHOT_TOKEN", "token")
    monkeypatch.setenv("KVHEARTH_STORE_PASSWORD", "word")
    config = serve("--engine", "http://h:1", "--api-key-file", str(tmp_path / "key")).config
    assert (config.api_key, config.kv.snapshot_token, config.kv.store_password) == ("near", "token", "word")
    assert serve("--engine", "http://h:1").config.api_key == "far"


def test_a_router_can_read_its_settings_again_with_the_flags_over_them(
    serve: Callable[..., Started], tmp_path: Path
) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("engines: [http://h:1]\ntimeouts: {connect_seconds: 1, idle_seconds: 1}\n")
    started = serve("--config", str(path), "--idle-timeout-seconds", "9")
    assert started.config_file == path
    assert (started.config.timeouts.connect_seconds, started.config.timeouts.idle_seconds) == (1, 9)
    path.write_text(path.read_text().replace("1}", "2}").replace("s: 1,", "s: 2,"))
    assert (started.reread().timeouts.connect_seconds, started.reread().timeouts.idle_seconds) == (2, 9)


def test_the_file_named_in_the_environment_is_followed_too(
    serve: Callable[..., Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.yaml").write_text("engines: [http://h:1]\n")
    monkeypatch.setenv("KVHEARTH_ROUTER_CONFIG", str(tmp_path / "r.yaml"))
    assert serve().config_file == tmp_path / "r.yaml"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "engines: no engine given; name at least one, as http://host:port"),
        (["--engine", "nonsense"], "--engine nonsense: 'nonsense' is not an http URL with a host and a port; use"),
        (["--engine", "http://h:1", "--listen", "0.0.0.0:1"], "--listen: 0.0.0.0 is reachable from other machines"),
        (["--engine", "http://h:1", "--policy", "magic"], "--policy: unknown policy 'magic'; use one of"),
        (["--engine", "http://h:1", "--decisions-kept", "few"], "--decisions-kept: 'few' is not a whole number;"),
        (["--config", "/nowhere"], "--config: cannot read /nowhere: No such file or directory; give a YAML file"),
        (["--api-key", "hush"], "No such option: --api-key"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["router", "serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"kvhearth: error: {line}")
    assert captured.err.count("\n") == 1


def test_the_help_has_every_flag_in_the_panel_of_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(["router", "serve", "--help"]) == 0
    page = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    titles = re.findall(r"─ ([A-Z][^─]*?) ─", page)
    assert [title for title in titles if title != "Options"] == list(PANELS.values())
    panels = dict(zip(titles, re.split(r"─ [A-Z][^─]*? ─", page)[1:], strict=True))
    for setting in TABLE.settings:
        if setting.flag is not None:
            assert f" {setting.flag} " in panels[PANELS[setting.group]]


class TestCheck:
    def test_prints_what_is_in_force_without_secrets(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "router.yaml"
        path.write_text("engines: [{name: a, url: http://h:1, role: decode}]\nlimits: {max_body_bytes: 1048576}\n")
        monkeypatch.setenv("KVHEARTH_ROUTER_API_KEY", "hush")
        monkeypatch.setenv("KVHEARTH_ROUTER_QUEUE_WAIT_SECONDS", "3")
        assert run(["router", "check", "--config", str(path)]) == 0
        printed = capsys.readouterr().out
        assert "hush" not in printed
        assert "# api_key is set, and not shown" in printed
        data = yaml.safe_load(printed)
        assert data["engines"] == [{"name": "a", "url": "http://h:1", "role": "decode"}]
        assert (data["limits"]["max_body_bytes"], data["queue"]["wait_seconds"]) == ("1MiB", 3.0)
        assert (data["listen"], data["policy"]) == ("127.0.0.1:8000", "prefix")

    def test_names_a_mistake_in_one_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "router.yaml"
        path.write_text("engines: [http://h:1]\nlimits: {max_body_byte: 1}\n")
        assert run(["router", "check", "--config", str(path)]) == 2
        line = f"{path}: limits: 'max_body_byte' is not a setting; did you mean max_body_bytes?"
        assert capsys.readouterr().err == f"kvhearth: error: {line}\n"
