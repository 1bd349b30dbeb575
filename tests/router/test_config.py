"""Impossible configurations are refused with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    parse_engine_url,
    parse_listen,
)
from kvhearth.routing.policies.prefix import PrefixSettings

ENGINE = ("e0", "http://127.0.0.1:8001")
EVENTS = EventSource("tcp://127.0.0.1:5557")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engines": []}, "engines: no engine given; name at least one"),
        ({"engines": [ENGINE, ENGINE]}, "engines: 'e0' is there twice"),
        ({"engines": [("a b", ENGINE[1])]}, "engines: 'a b' cannot name an engine"),
        ({"engines": [("a\r\nX: y", ENGINE[1])]}, "cannot name an engine"),
        ({"engines": [("e", "ftp://h:1")]}, "engine e: 'ftp://h:1' is not an http URL"),
        ({"engines": [("e", "127.0.0.1:1")]}, "engine e: "),
        ({"engines": [("e", "http://h:99999")]}, "engine e: 'http://h:99999' is not a URL"),
        ({"engines": [("e", "http://h:1/v1")]}, "has more than host and port; use http://host:port"),
        ({"policy": "magic"}, "policy: unknown policy 'magic'; use one of kv-aware, least-loaded, prefix"),
        ({"policy": "kv-aware"}, "policy: kv-aware needs the engines' KV events"),
        ({"aliases": {"gpt-4": ""}}, "alias: 'gpt-4' means ''; give name=model"),
        ({"aliases": {"a": "b", "b": "c"}}, "no alias of an alias"),
        ({"data_parallel": {"e1": 2}}, "data parallel: there is no engine 'e1'; name one of e0"),
        ({"data_parallel": {"e0": 0}}, "data parallel, e0: 0 ranks; use 1 up to 1024"),
        ({"session_header": "a b"}, "session header: 'a b' cannot name a header"),
        ({"decisions_kept": 0}, "decisions kept: 0; use 1 up to 10000"),
        ({"kv": KvSettings(events={"e1": EVENTS})}, "kv events: there is no engine 'e1'; name one of e0"),
        ({"listen_port": 70000}, "listen: port 70000 does not exist"),
        ({"roles": {"e1": "decode"}}, "role: there is no engine 'e1'; name one of e0"),
        ({"roles": {"e0": "cook"}}, "role, e0: 'cook' is no role; use one of both, prefill, decode"),
        ({"api_key": ""}, "api_key: the key is empty"),
        ({"api_key": "a\nb"}, "api_key: "),
        ({"api_key": "k", "tenants_file": Path("t")}, "tenants_file: one key for all, and tenants with keys"),
    ],
)
def test_bad_values_are_named(options, said):
    with pytest.raises(UserError) as caught:
        RouterConfig(**{"engines": [ENGINE], **options})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("group", "values", "said"),
    [
        (Limits, {"max_body_bytes": 0}, "limits.max_body_bytes: 0 is not positive"),
        (Timeouts, {"idle_seconds": -1}, "timeouts.idle_seconds: -1 is not positive"),
        (HealthChecks, {"interval_seconds": 0}, "health.interval_seconds: 0 is not positive"),
        (Queueing, {"max_waiting_requests": 0}, "queue.max_waiting_requests: 0 is not positive"),
        (Queueing, {"wait_seconds": -1}, "queue.wait_seconds: -1 is negative"),
        (Resilience, {"retry_share": 1.5}, "resilience.retry_share: 1.5 is more than all; use up to 1"),
        (Discovery, {"dns": "vllm"}, "discovery.dns: 'vllm' is not name:port"),
        (Disaggregation, {"transfer": "post"}, "disaggregation.transfer: 'post' is unknown; use one of store, nixl"),
        (Tls, {"cert_file": Path("c")}, "tls.key_file: a certificate needs its key"),
    ],
)
def test_bad_values_of_a_group_are_named(group, values, said):
    with pytest.raises(UserError) as caught:
        group(**values)
    assert said in str(caught.value)


def test_engines_may_be_left_to_discovery():
    RouterConfig(discovery=Discovery(dns="vllm:8000"))
    assert RouterConfig(discovery=Discovery(dns="vllm:8000", kv_events_port=5557)).policy_name == "kv-aware"


def test_engines_get_the_key_of_all_or_with_tenants_their_own():
    assert RouterConfig(engines=[ENGINE], api_key="k").key_for_engines == "k"
    assert RouterConfig(engines=[ENGINE], tenants_file=Path("t"), engine_key="e").key_for_engines == "e"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_listening_beyond_loopback_wants_a_key(host):
    with pytest.raises(UserError, match="no API key; set KVHEARTH_ROUTER_API_KEY"):
        RouterConfig(engines=[ENGINE], listen_host=host)
    RouterConfig(engines=[ENGINE], listen_host=host, api_key="k")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.5.5.5", "::1", "localhost"])
def test_loopback_wants_none(host):
    RouterConfig(engines=[ENGINE], listen_host=host)


def test_the_key_is_not_shown():
    assert "sk-secret" not in repr(RouterConfig(engines=[ENGINE], api_key="sk-secret"))


def test_addresses():
    assert parse_listen("127.0.0.1:8000") == ("127.0.0.1", 8000)
    assert parse_listen("[::1]:0") == ("::1", 0)
    for bad in ("8000", "host:", ":80", "host:http", "h:-1"):
        with pytest.raises(UserError, match="listen: "):
            parse_listen(bad)
    assert parse_engine_url("http://h", where="e") == ("h", 80)
    assert parse_engine_url("https://h", where="e") == ("h", 443)
    assert parse_engine_url("http://[::1]:9/", where="e") == ("::1", 9)


@pytest.mark.parametrize(
    "setting", [{"max_pieces": 0}, {"load_factor": 0.5}, {"load_slack_tokens": -1}, {"min_share": 2}]
)
def test_prefix_settings_out_of_range_are_named(setting):
    [name] = setting
    with pytest.raises(UserError, match=f"policy prefix, {name}"):
        PrefixSettings(**setting)


def test_the_policy_is_kv_aware_where_engines_tell_their_events_else_prefix():
    assert RouterConfig(engines=[ENGINE]).policy_name == "prefix"
    told = KvSettings(events={"e0": EVENTS})
    assert RouterConfig(engines=[ENGINE], kv=told).policy_name == "kv-aware"
    assert RouterConfig(engines=[ENGINE], kv=told, policy="session").policy_name == "session"


def test_the_snapshots_token_is_not_shown():
    config = RouterConfig(engines=[ENGINE], kv=KvSettings(events={"e0": EVENTS}, snapshot_token="sk-secret"))
    assert "sk-secret" not in repr(config)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"events": {"e0": EventSource("127.0.0.1:1")}}, "kv events, e0: '127.0.0.1:1' is not a ZeroMQ address"),
        ({"events": {"e0": EventSource("tcp://h:99999")}}, "kv events, e0: 'h:99999' is not host:port"),
        ({"events": {"e0": EventSource("")}}, "kv events, e0: no address; use tcp://host:port"),
        ({"events": {"e0": EventSource("tcp://h:1", snapshot="h")}}, "kv events, e0: 'h' is not host:port"),
        ({"index_bytes": 0}, "kv.index_bytes: 0 is not positive"),
        ({"block_tokens": -1}, "kv.block_tokens: -1 is negative"),
        ({"gpu": "H100"}, "cost model: gpu without model"),
    ],
)
def test_bad_settings_of_kv_aware_are_named(settings, said):
    with pytest.raises(UserError) as caught:
        KvSettings(**settings)
    assert said in str(caught.value)
