"""The router's configuration from flags, environment and YAML, and what each mistake is answered with."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given as over
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.router.config import (
    Disaggregation,
    Discovery,
    EventSource,
    HealthChecks,
    KvSettings,
    Limits,
    Queueing,
    Resilience,
    RouterConfig,
    Timeouts,
    Tls,
)
from kvhearth.router.settings import LEAVES, PANELS, TABLE, as_yaml, read_router_settings
from kvhearth.router.settings.shown import size_text
from kvhearth.routing.policies.prefix import PrefixSettings
from kvhearth.units import parse_bytes

MIB = 2**20
ENGINES = {"engines": ["a=http://h:1"]}


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "router.yaml"
        path.write_text(text)
        return path

    return write


def refusal(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> str:
    with pytest.raises(UserError) as refused:
        read_router_settings(flags or {}, environ or {}, file)
    return str(refused.value)


WHOLE = """
listen: "[::1]:9000"
policy: kv-aware
engines:
  - {name: a, url: http://a:8000, role: prefill, data_parallel: 2, kv_events: "tcp://a:5557",
     kv_replay: "tcp://a:5558", kv_snapshot: "a:9100"}
  - b=http://b:8000
  - https://c:8443
aliases: {gpt-4: llama}
models: [llama, qwen]
session_header: x-user
decisions_kept: 7
tenants_file: tenants.yaml
limits: {max_body_bytes: 8MiB, max_head_bytes: 32KiB, max_buffered_bytes: 1GB, max_requests_in_flight: 1,
         max_requests_per_engine: 2, max_idle_per_engine: 3, max_connections: 4}
timeouts: {connect_seconds: 1, first_byte_seconds: 2, idle_seconds: 3, request_seconds: 4, client_idle_seconds: 5,
           engine_idle_seconds: 6, drain_seconds: 7, sweep_seconds: 0.25}
health: {interval_seconds: 1.5, deadline_seconds: 2.5, failures_to_down: 4, models_every: 5}
queue: {wait_seconds: 0, max_waiting_requests: 5, max_waiting_of_tenant: 6, engine_backlog: 0}
resilience: {max_attempts: 2, retry_share: 0.1, retry_burst: 3, failures_to_open: 4, error_share: 1, open_seconds: 5,
             longest_open_seconds: 6, slow_start_seconds: 0}
discovery: {file: engines.yaml, dns: "vllm:8000", dns_interval_seconds: 9, kv_events_port: 5557}
kv: {tokenizer: model, store: "store:7420", block_tokens: 16, index_bytes: 64MiB, tokens_seconds: 1, gpu: H100,
     model: llama, tensor_parallel: 4}
prefix: {max_pieces: 10, load_factor: 2, load_slack_tokens: 0, min_share: 0.5}
disaggregation: {transfer: nixl, local_prefill_tokens: 0, await_seconds: 1}
tls: {cert_file: tls.crt, key_file: tls.key, engine_ca_file: /etc/ca.crt}
"""


def whole(folder: Path) -> RouterConfig:
    return RouterConfig(
        engines=[("a", "http://a:8000"), ("b", "http://b:8000"), ("c:8443", "https://c:8443")],
        listen_host="::1",
        listen_port=9000,
        policy="kv-aware",
        aliases={"gpt-4": "llama"},
        models=["llama", "qwen"],
        data_parallel={"a": 2},
        roles={"a": "prefill"},
        session_header="x-user",
        decisions_kept=7,
        tenants_file=folder / "tenants.yaml",
        limits=Limits(8 * MIB, 32 * 1024, 10**9, 1, 2, 3, 4),
        timeouts=Timeouts(1, 2, 3, 4, 5, 6, 7, 0.25),
        health=HealthChecks(1.5, 2.5, 4, 5),
        queue=Queueing(0, 5, 6, 0),
        resilience=Resilience(2, 0.1, 3, 4, 1, 5, 6, 0),
        discovery=Discovery(folder / "engines.yaml", "vllm:8000", 9, 5557),
        kv=KvSettings(
            events={"a": EventSource("tcp://a:5557", "tcp://a:5558", "a:9100")},
            tokenizer=str(folder / "model"),
            store="store:7420",
            block_tokens=16,
            index_bytes=64 * MIB,
            tokens_seconds=1,
            gpu="H100",
            model="llama",
            tensor_parallel=4,
        ),
        prefix=PrefixSettings(10, 2, 0, 0.5),
        disaggregation=Disaggregation("nixl", 0, 1),
        tls=Tls(folder / "tls.crt", folder / "tls.key", Path("/etc/ca.crt")),
    )


class TestWhatCanBeSet:
    def test_everything_can_be_given_in_yaml(self, yaml_file: Any, tmp_path: Path) -> None:
        assert read_router_settings({}, {}, yaml_file(WHOLE)) == whole(tmp_path)

    def test_the_file_above_has_every_setting(self) -> None:
        given = {
            f"{name}.{key}" if name in PANELS else name
            for name, value in yaml.safe_load(WHOLE).items()
            for key in (value if name in PANELS else [name])
        }
        elsewhere = {setting.name for setting in TABLE.settings if setting.secret or f"{setting.name}"[:-5] in SECRETS}
        assert given == {setting.name for setting in TABLE.settings if setting.in_yaml} - elsewhere

    def test_every_value_of_the_configuration_has_a_setting(self) -> None:
        said = {setting.name for setting in TABLE.settings}
        merged = {"listen_host": "listen", "listen_port": "listen"}
        assert {merged.get(leaf.path, leaf.path) for leaf in LEAVES} | {"kv.replay", "kv.snapshot"} <= said
        counted = sum(
            len(fields(getattr(RouterConfig(**_some()), field.name)))
            if is_dataclass(getattr(RouterConfig(**_some()), field.name))
            else 1
            for field in fields(RouterConfig)
        )
        assert len(LEAVES) == counted

    def test_every_setting_has_its_own_places_and_a_line_of_help(self) -> None:
        for place in ("flag", "variable", "parameter"):
            places = [getattr(setting, place) for setting in TABLE.settings if getattr(setting, place)]
            assert len(places) == len(set(places))
        for setting in TABLE.settings:
            assert setting.help.endswith(".")
            assert setting.group in PANELS
            assert setting.variable
            assert (setting.flag is None) == setting.secret

    def test_flags_keep_their_names(self) -> None:
        flags = {setting.flag for setting in TABLE.settings}
        assert flags >= {
            *("--engine", "--listen", "--policy", "--alias", "--data-parallel", "--session-header", "--kv-events"),
            *("--kv-replay", "--kv-snapshot", "--store", "--tokenizer", "--block-size", "--index-size", "--gpu"),
            *("--cost-model", "--tensor-parallel-size", "--decisions-kept", "--prefix-max-pieces"),
            *("--prefix-load-factor", "--max-requests-in-flight", "--connect-timeout-seconds", "--drain-seconds"),
            *("--first-byte-timeout-seconds", "--idle-timeout-seconds", "--health-interval-seconds", "--api-key-file"),
        }

    def test_nothing_but_engines_is_the_defaults(self) -> None:
        assert read_router_settings(ENGINES, {"PATH": "/bin"}) == RouterConfig(engines=[("a", "http://h:1")])

    def test_variables_have_their_group_in_the_name(self) -> None:
        environ = {
            "KVHEARTH_ROUTER_ENGINES": "a=http://h:1, http://i:2",
            "KVHEARTH_ROUTER_DATA_PARALLEL": "a=2",
            "KVHEARTH_ROUTER_TIMEOUTS_CONNECT_SECONDS": "9",
            "KVHEARTH_ROUTER_LIMITS_MAX_BODY_BYTES": "1MiB",
            "KVHEARTH_ROUTER_ALIASES": "x=m,y=m",
            "KVHEARTH_ROUTER_LORA_PATHS": "l=/l",
        }
        assert read_router_settings({}, environ) == RouterConfig(
            engines=[("a", "http://h:1"), ("i:2", "http://i:2")],
            data_parallel={"a": 2},
            timeouts=Timeouts(connect_seconds=9),
            limits=Limits(max_body_bytes=MIB),
            aliases={"x": "m", "y": "m"},
        )

    def test_flags_win_over_the_environment_and_that_over_the_file(self, yaml_file: Any) -> None:
        path = yaml_file("engines: [a=http://h:1]\ntimeouts: {connect_seconds: 1, idle_seconds: 1, drain_seconds: 1}")
        environ = {"KVHEARTH_ROUTER_TIMEOUTS_IDLE_SECONDS": "2", "KVHEARTH_ROUTER_TIMEOUTS_DRAIN_SECONDS": "2"}
        timeouts = read_router_settings({"timeouts.drain_seconds": "3"}, environ, path).timeouts
        assert (timeouts.connect_seconds, timeouts.idle_seconds, timeouts.drain_seconds) == (1, 2, 3)

    def test_the_file_can_be_named_in_the_environment(self, yaml_file: Any) -> None:
        environ = {"KVHEARTH_ROUTER_CONFIG": str(yaml_file("engines: [http://h:1]"))}
        assert read_router_settings({}, environ).engines == [("h:1", "http://h:1")]

    def test_no_tokenizer_can_be_said(self, yaml_file: Any) -> None:
        path = yaml_file("{engines: [http://h:1], kv: {tokenizer: far}}")
        assert read_router_settings({"kv.tokenizer": ""}, {}, path).kv.tokenizer == ""


class TestEngines:
    def test_a_nearer_list_takes_the_place_of_all_that_was_said_of_engines(self, yaml_file: Any) -> None:
        path = yaml_file("engines: [{name: a, url: http://h:1, data_parallel: 2, kv_events: 'tcp://h:2'}]")
        config = read_router_settings({"engines": ["b=http://h:3"]}, {}, path)
        assert config == RouterConfig(engines=[("b", "http://h:3")])

    def test_a_flag_adds_to_what_the_file_says_of_an_engine(self, yaml_file: Any) -> None:
        text = "engines: [{name: a, url: http://h:1, data_parallel: 2, kv_events: 'tcp://h:2'}, b=http://h:3]"
        flags = {"data_parallel": ["b=4"], "kv.events": ["a=tcp://h:9"], "kv.replay": ["a=tcp://h:5"], "roles": []}
        config = read_router_settings(flags, {"KVHEARTH_ROUTER_ROLES": "a=prefill,b=decode"}, yaml_file(text))
        assert config.data_parallel == {"a": 2, "b": 4}
        assert config.kv.events == {"a": EventSource("tcp://h:9", "tcp://h:5")}
        assert config.roles == {"a": "prefill", "b": "decode"}

    def test_no_engines_in_the_file_is_for_those_who_find_them_otherwise(self, yaml_file: Any) -> None:
        path = yaml_file("engines:\ndiscovery: {dns: 'vllm:8000'}")
        assert list(read_router_settings({}, {}, path).engines) == []
        assert "engines: no engine given; name at least one" in refusal(file=yaml_file("engines: []"))


SECRETS = {
    "api_key": "KVHEARTH_ROUTER_API_KEY",
    "engine_key": "KVHEARTH_ROUTER_ENGINE_KEY",
    "admin_key": "KVHEARTH_ROUTER_ADMIN_KEY",
    "salt_secret": "KVHEARTH_ROUTER_SALT_SECRET",
    "kv.store_password": "KVHEARTH_STORE_PASSWORD",
    "kv.snapshot_token": "KVHEARTH_SNAPSHOT_TOKEN",
}


@pytest.mark.parametrize(("name", "variable"), SECRETS.items())
class TestSecrets:
    def value(self, config: RouterConfig, name: str) -> Any:
        group, _, key = name.rpartition(".")
        value = getattr(getattr(config, group) if group else config, key)
        return value.decode() if isinstance(value, bytes) else value

    def test_come_from_the_environment_or_a_file_and_the_nearer_wins(
        self, name: str, variable: str, yaml_file: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "k").write_text("from-a-file\n")
        group, _, key = name.rpartition(".")
        text = f"engines: [a=http://h:1]\n{group or 'x'}: {{{key}_file: k}}" if group else f"{key}_file: k"
        path = yaml_file(text)
        assert self.value(read_router_settings(ENGINES, {}, path), name) == "from-a-file"
        assert self.value(read_router_settings(ENGINES, {variable: "near"}, path), name) == "near"
        flags = {f"{name}_file": str(tmp_path / "k")}
        assert self.value(read_router_settings(ENGINES | flags, {variable: "far"}), name) == "from-a-file"

    def test_have_no_place_in_yaml_and_are_in_no_error(self, name: str, variable: str, yaml_file: Any) -> None:
        group, _, key = name.rpartition(".")
        said = refusal(file=yaml_file(f"{group}: {{{key}: hush}}" if group else f"{key}: hush"))
        assert f"router.yaml: {name}: a" in said
        assert f"has no place in a file of settings; put it into a file of its own and name that as {key}_file" in said
        assert said.endswith(f"or set {variable}")
        assert "hush" not in said

    def test_cannot_be_flags(self, name: str, variable: str) -> None:
        assert TABLE.by_name[name].flag is None
        assert TABLE.by_name[name].variable == variable

    def test_are_not_shown_in_the_configuration_in_force(self, name: str, variable: str) -> None:
        text = as_yaml(read_router_settings(ENGINES, {variable: "hush"}))
        assert "hush" not in text
        assert f"# {name} is set, and not shown\n" in text

    def test_one_that_cannot_be_sent_is_refused_with_its_file(self, name: str, variable: str, tmp_path: Path) -> None:
        if name not in ("api_key", "engine_key", "admin_key"):
            return
        (tmp_path / "k").write_text("h\u00fcsh")
        said = refusal(ENGINES | {f"{name}_file": str(tmp_path / "k")})
        assert said.startswith(f"--{name.replace('_', '-')}-file: the key is empty or not printable ASCII")

    def test_an_empty_file_is_named(self, name: str, variable: str, tmp_path: Path) -> None:
        (tmp_path / "k").write_text("\n")
        said = refusal(ENGINES | {f"{name}_file": str(tmp_path / "k")})
        assert said.startswith(f"--{name.rpartition('.')[2].replace('_', '-')}-file: ")
        assert "is empty; put the secret into it" in said


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("polcy: x", "router.yaml: 'polcy' is not a setting; did you mean policy?"),
        ("timeouts: {conect_seconds: 1}", "timeouts: 'conect_seconds' is not a setting; did you mean connect_seconds?"),
        ("connect_seconds: 1", "'connect_seconds' is not a setting; did you mean timeouts.connect_seconds?"),
        ("timeout: {}", "'timeout' is not a setting; did you mean timeouts?"),
        ("limits.max_connections: 1", "is not a setting; write max_connections below limits, indented"),
        ("zzz: 1", "'zzz' is not a setting; see 'kvhearth router serve --help' for the settings"),
        ("limits: 4", "router.yaml: limits: 4 is not a mapping; write its settings below limits, indented"),
        ("limits: {max_body_bytes: much}", "router.yaml: limits.max_body_bytes: 'much' is not a size; write bytes or"),
        ("timeouts: {connect_seconds: 5s}", "router.yaml: timeouts.connect_seconds: '5s' is not a number of seconds"),
        ("timeouts: {connect_seconds: 0}", "router.yaml: timeouts.connect_seconds: 0.0 is not positive"),
        ("timeouts: {connect_seconds: .nan}", "router.yaml: timeouts.connect_seconds: nan is not positive"),
        ("timeouts: {connect_seconds: .inf}", "router.yaml: timeouts.connect_seconds: without an end; write a number"),
        ("resilience: {error_share: 2}", "router.yaml: resilience.error_share: 2.0 is more than all"),
        ("prefix: {min_share: 2}", "router.yaml: prefix.min_share: 2.0 is out of range; use 0 up to 1"),
        ("kv: {gpu: H100}", "router.yaml: kv.gpu: gpu without model; name both, or neither"),
        ("kv: {model: llama}", "router.yaml: kv.model: model without gpu; name both, or neither"),
        ("kv: {events: {a: 'tcp://h:1'}}", "router.yaml: kv.events: not a setting of a file; write it with its engine"),
        ("data_parallel: {a: 2}", "router.yaml: data_parallel: not a setting of a file; write it with its engine, as"),
        ("{engines: [http://a:1], policy: magic}", "router.yaml: policy: unknown policy 'magic'; use one of"),
        ("{engines: [http://a:1], policy: kv-aware}", "router.yaml: policy: kv-aware needs the engines' KV events"),
        ("{engines: [http://a:1], listen: '0.0.0.0:1'}", "router.yaml: listen: 0.0.0.0 is reachable from other"),
        ("{engines: [http://a:1], listen: '127.0.0.1:70000'}", "router.yaml: listen: port 70000 does not exist"),
        ("listen: 8000", "router.yaml: listen: 8000 is not text"),
        ("listen: '8000'", "router.yaml: listen: '8000' is not an address; use host:port"),
        ("{engines: [http://a:1], session_header: 'a b'}", "router.yaml: session_header: 'a b' cannot name a header"),
        ("{engines: [http://a:1], decisions_kept: 0}", "router.yaml: decisions_kept: 0; use 1 up to"),
        ("{engines: [http://a:1], aliases: {a: b, b: c}}", "router.yaml: aliases: 'a' means 'b'; give name=model"),
        ("aliases: {4: b}", "router.yaml: aliases: 4: 'b' is not a name and a text; put both in quotes"),
        ("tls: {key_file: k}", "tls.cert_file: a certificate needs its key; name both, or neither"),
        ("engines: {a: http://a:1}", "router.yaml: engines: {'a': 'http://a:1'} is not a list; write a list of URLs"),
        ("engines: [7]", "router.yaml: engines[0]: 7 is no engine; write a URL, or {name: a"),
        ("engines: [{name: a}]", "router.yaml: engines[0]: an engine without a URL; give url: http://host:8000"),
        ("engines: [{nmae: a, url: http://a:1}]", "engines[0]: 'nmae' is not said of an engine; did you mean name?"),
        ("engines: [{name: 7, url: http://a:1}]", "router.yaml: engines[0].name: 7 is not text; put it in quotes"),
        ("engines: [http://a:1, zzz]", "router.yaml: engines[1]: 'zzz' is not an http URL with a host and a port"),
        ("engines: [{name: a, url: a:1}]", "router.yaml: engines[0].url: 'a:1' is not an http URL"),
        ("engines: [http://a:1, http://a:1]", "router.yaml: engines[1]: 'a:1' is there twice; give each engine its"),
        ("engines: [{url: http://a:1, role: cook}]", "router.yaml: engines[0].role: 'cook' is no role; use one of"),
        ("engines: [{url: http://a:1, data_parallel: 0}]", "router.yaml: engines[0].data_parallel: 0 ranks"),
        ("engines: [{url: http://a:1, data_parallel: two}]", "engines[0].data_parallel: 'two' is not a whole number"),
        ("engines: [{url: http://a:1, data_parallel: true}]", "engines[0].data_parallel: True is not a whole number"),
        (
            "engines: [{url: http://a:1, kv_events: x}]",
            "router.yaml: engines[0].kv_events: 'x' is not a ZeroMQ address",
        ),
        (
            "engines: [{url: http://a:1, kv_events: 'tcp://a:1', kv_replay: x}]",
            "router.yaml: engines[0].kv_replay: 'x' is not a ZeroMQ address",
        ),
        (
            "engines: [{url: http://a:1, kv_events: 'tcp://a:1', kv_snapshot: x}]",
            "router.yaml: engines[0].kv_snapshot: 'x' is not host:port",
        ),
        (
            "engines: [{url: http://a:1, kv_replay: 'tcp://a:1'}]",
            "engines[0].kv_replay: 'a:1' publishes no events; say",
        ),
    ],
)
def test_a_mistake_in_yaml_is_named_with_its_key_and_a_remedy(yaml_file: Any, text: str, complaint: str) -> None:
    said = refusal(file=yaml_file(text + "\n"))
    assert complaint in said
    assert "\n" not in said


def test_mistakes_in_flags_and_variables_are_named_as_such() -> None:
    assert refusal({"engines": ["nonsense"]}).startswith("--engine nonsense: 'nonsense' is not an http URL")
    assert refusal(ENGINES | {"data_parallel": ["a=x"]}).startswith("--data-parallel a: 'x' is not a whole number")
    assert refusal(ENGINES | {"data_parallel": ["b=1"]}).startswith("--data-parallel: there is no engine 'b'; name one")
    assert refusal(ENGINES | {"data_parallel": ["a"]}).startswith("--data-parallel: 'a' is not name=ranks; give name=")
    assert refusal(ENGINES | {"kv.events": ["a=x"]}).startswith("--kv-events a: 'x' is not a ZeroMQ address")
    assert refusal(ENGINES | {"kv.replay": ["a=tcp://h:1"]}).startswith("--kv-replay a: 'a' publishes no events")
    assert refusal(ENGINES | {"health.failures_to_down": "0"}).startswith(
        "--health-failures-to-down: 0 is not positive"
    )
    environ = {"KVHEARTH_ROUTER_QUEUE_WAIT_SECONDS": "-1"}
    assert refusal(ENGINES, environ).startswith("KVHEARTH_ROUTER_QUEUE_WAIT_SECONDS: -1.0 is negative")
    assert refusal(ENGINES, {"KVHEARTH_ROUTER_API_KEY": "h\u00fcsh"}).startswith(
        "KVHEARTH_ROUTER_API_KEY: the key is empty"
    )
    assert refusal({}, {}) == "engines: no engine given; name at least one, as http://host:port"


def test_a_misspelt_variable_is_named_and_what_kubernetes_adds_is_not() -> None:
    said = refusal(ENGINES, {"KVHEARTH_ROUTER_LIMITS_MAX_CONECTIONS": "1"})
    assert (
        said
        == "KVHEARTH_ROUTER_LIMITS_MAX_CONECTIONS: not a setting; did you mean KVHEARTH_ROUTER_LIMITS_MAX_CONNECTIONS?"
    )
    port = "KVHEARTH_ROUTER_PORT"
    kubernetes = [port, f"{port}_8000_TCP", f"{port}_8000_TCP_ADDR", f"{port}_8000_TCP_PORT", f"{port}_8000_TCP_PROTO"]
    kubernetes += ["KVHEARTH_ROUTER_SERVICE_HOST", "KVHEARTH_ROUTER_SERVICE_PORT", "KVHEARTH_ROUTER_SERVICE_PORT_HTTP"]
    kubernetes += [name.replace("ROUTER", "ROUTER_ADMIN") for name in kubernetes]
    assert read_router_settings(ENGINES, dict.fromkeys(kubernetes, "x")) == read_router_settings(ENGINES, {})


class TestTheConfigurationInForce:
    def test_is_printed_as_a_file_that_says_the_same(self, yaml_file: Any, tmp_path: Path) -> None:
        text = as_yaml(read_router_settings({}, {}, yaml_file(WHOLE)))
        assert read_router_settings({}, {}, yaml_file(text)) == whole(tmp_path)
        assert "max_body_bytes: 8MiB\n" in text

    def test_names_the_policy_also_where_nobody_did(self) -> None:
        assert yaml.safe_load(as_yaml(read_router_settings(ENGINES, {})))["policy"] == "prefix"

    @over(st.data())
    def test_any_configuration_comes_back_from_what_is_printed(
        self, tmp_path_factory: Any, data: st.DataObject
    ) -> None:
        config = data.draw(configurations())
        path = tmp_path_factory.mktemp("printed") / "router.yaml"
        path.write_text(as_yaml(config))
        assert read_router_settings({}, {}, path) == replace(config, policy=config.policy_name)

    @over(st.integers(0, 10**18 - 1))
    def test_a_size_means_what_it_meant(self, nbytes: int) -> None:
        assert parse_bytes(size_text(nbytes)) == nbytes


def _some() -> dict[str, Any]:
    return {"engines": [("a", "http://h:1")]}


_names = st.text("abcdefg-0123456789", min_size=1, max_size=8)
_seconds = st.floats(0.001, 1e6)
_counts = st.integers(1, 10**9)


@st.composite
def configurations(draw: st.DrawFn) -> RouterConfig:
    """Any configuration without secrets."""
    names = draw(st.lists(_names, min_size=1, max_size=4, unique=True))
    some = st.sampled_from(names)
    models = st.text(min_size=1, max_size=8)
    events = st.builds(
        EventSource, st.just("tcp://h:1"), st.sampled_from(["", "tcp://h:2"]), st.sampled_from(["", "h:3"])
    )
    return RouterConfig(
        engines=[(name, f"http://{draw(_hosts)}:{draw(st.integers(1, 65535))}") for name in names],
        listen_port=draw(st.integers(0, 65535)),
        aliases={f"alias {key}": model for key, model in draw(st.dictionaries(_names, models, max_size=3)).items()},
        models=draw(st.lists(models, max_size=3)) or (),
        data_parallel=draw(st.dictionaries(some, st.integers(1, 1024))),
        roles=draw(st.dictionaries(some, st.sampled_from(["both", "prefill", "decode"]))),
        limits=draw(st.builds(Limits, *[_counts] * 7)),
        timeouts=draw(st.builds(Timeouts, *[_seconds] * 8)),
        health=draw(st.builds(HealthChecks, _seconds, _seconds, _counts, _counts)),
        kv=KvSettings(events=draw(st.dictionaries(some, events)), index_bytes=draw(_counts)),
    )


_hosts = st.sampled_from(["localhost", "10.0.0.1", "[fd00::1]", "vllm-0.vllm.svc"])
