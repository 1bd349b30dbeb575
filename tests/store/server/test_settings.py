"""A server's settings from flags, environment and YAML, and what each mistake is answered with."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvhearth.errors import UserError
from kvhearth.store.server.config import StoreConfig
from kvhearth.store.server.settings import SETTINGS, markdown_table, read_settings

MIB, GIB = 2**20, 2**30


@pytest.fixture
def yaml_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "store.yaml"
        path.write_text(text)
        return path

    return write


def refusal(
    flags: dict[str, Any] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> str:
    with pytest.raises(UserError) as refused:
        read_settings(flags or {}, environ or {}, file)
    return str(refused.value)


def test_nothing_given_is_the_defaults() -> None:
    assert read_settings({}, {"PATH": "/bin"}) == StoreConfig()


def test_flags_win_over_the_environment_and_that_over_the_file(yaml_file: Any) -> None:
    path = yaml_file("capacity: 1MiB\nmax_connections: 1\nmax_items: 1\n")
    environ = {"KVHEARTH_STORE_CAPACITY": "2MiB", "KVHEARTH_STORE_MAX_CONNECTIONS": "2", "KVHEARTH_STORE_MAX_ITEMS": ""}
    config = read_settings({"capacity": "3MiB", "max_connections": None}, environ, path)
    assert (config.capacity_bytes, config.max_connections, config.max_items) == (3 * MIB, 2, 1)


def test_every_setting_can_be_given_in_yaml(yaml_file: Any, tmp_path: Path) -> None:
    text = """
    capacity: 8GiB
    listen: 0.0.0.0:7420
    unix: run/store.sock
    shared_memory: off
    http_listen: 127.0.0.1:9420
    users_file: /etc/users
    insecure: yes
    tls_certificate: tls.crt
    tls_key: tls.key
    tls_client_ca: ca.crt
    policy: lru
    max_value: 16MiB
    max_items: 1000
    huge_pages: true
    max_connections: 12
    idle_timeout_seconds: 60
    stall_timeout_seconds: 2.5
    disk: /nvme
    disk_capacity: 1TiB
    disk_max_files: 5000
    disk_reserve: 10GB
    object_url: s3://bucket/prefix
    object_endpoint: http://ceph:8080
    object_region: eu
    object_timeout_seconds: 3
    object_capacity: 10TB
    write_mode: through
    min_sights: 2
    namespace_quota: 25%
    group_quota: 1GiB
    quotas: {ns: 50%, "00000012": 64MiB}
    read_ahead: off
    """
    config = read_settings({}, {}, yaml_file(text))
    assert config == StoreConfig(
        capacity_bytes=8 * GIB,
        listen="0.0.0.0:7420",
        unix=tmp_path / "run" / "store.sock",
        shared_memory=False,
        http_listen="127.0.0.1:9420",
        users_file=Path("/etc/users"),
        insecure=True,
        tls_certificate=tmp_path / "tls.crt",
        tls_key=tmp_path / "tls.key",
        tls_client_ca=tmp_path / "ca.crt",
        policy="lru",
        max_value_bytes=16 * MIB,
        max_items=1000,
        huge_pages=True,
        max_connections=12,
        idle_timeout_seconds=60.0,
        stall_timeout_seconds=2.5,
        disk=Path("/nvme"),
        disk_capacity_bytes=2**40,
        disk_max_files=5000,
        disk_reserve_bytes=10**10,
        object_url="s3://bucket/prefix",
        object_endpoint="http://ceph:8080",
        object_region="eu",
        object_timeout_seconds=3.0,
        object_capacity_bytes=10**13,
        write_mode="through",
        min_sights=2,
        namespace_quota_bytes=2 * GIB,
        group_quota_bytes=GIB,
        quotas={"ns": 4 * GIB, "00000012": 64 * MIB},
        read_ahead=False,
    )
    given = {line.split(":")[0].strip() for line in text.splitlines() if line.strip()}
    elsewhere = {"password_file", "default_ttl_seconds"}  # which go with no users file and no lower tier
    assert given == {setting.name for setting in SETTINGS if setting.in_yaml} - elsewhere


def test_every_setting_has_one_line_of_help_and_its_places() -> None:
    assert {setting.field for setting in SETTINGS} == {field.name for field in fields(StoreConfig)} | {"password_file"}
    table = markdown_table()
    for setting in SETTINGS:
        assert setting.help.endswith(".")
        assert setting.help in table
        assert setting.flag or setting.variable or setting.in_yaml
    assert "| `max_value` | `--max-value` | `KVHEARTH_STORE_MAX_VALUE` | `0` |" in table
    assert "--password`" not in table


def test_a_unix_socket_alone_means_no_tcp() -> None:
    assert read_settings({"unix": "/run/s"}, {}).listen is None
    assert read_settings({"unix": "/run/s", "listen": "127.0.0.1:1"}, {}).listen == "127.0.0.1:1"
    assert read_settings({"unix": "/run/s", "listen": "none"}, {}).listen is None
    assert "nowhere to listen" in refusal({"listen": "none"})


def test_the_config_file_can_be_named_in_the_environment(yaml_file: Any) -> None:
    path = yaml_file("capacity: 1MiB\n")
    assert read_settings({}, {"KVHEARTH_STORE_CONFIG": str(path)}).capacity_bytes == MIB
    assert "--config: cannot read /nowhere: No such file" in refusal(environ={"KVHEARTH_STORE_CONFIG": "/nowhere"})


class TestPasswords:
    def test_come_from_the_environment_or_a_file_and_the_nearer_wins(self, yaml_file: Any, tmp_path: Path) -> None:
        (tmp_path / "p").write_text("from a file\n")
        path = yaml_file("password_file: p\n")
        assert read_settings({}, {}, path).password == "from a file"
        assert read_settings({}, {"KVHEARTH_STORE_PASSWORD": "near"}, path).password == "near"
        flags = {"password_file": str(tmp_path / "p")}
        assert read_settings(flags, {"KVHEARTH_STORE_PASSWORD": "far"}).password == "from a file"

    def test_are_taken_as_they_are(self) -> None:
        assert read_settings({}, {"KVHEARTH_STORE_PASSWORD": "none"}).password == "none"

    def test_twice_in_the_environment_are_refused(self) -> None:
        environ = {"KVHEARTH_STORE_PASSWORD": "hush", "KVHEARTH_STORE_PASSWORD_FILE": "/p"}
        assert refusal(environ=environ).startswith("KVHEARTH_STORE_PASSWORD_FILE: the password is given twice; unset")

    def test_have_no_place_in_yaml(self, yaml_file: Any) -> None:
        said = refusal(file=yaml_file("password: hush\n"))
        assert "store.yaml: password: a password has no place in a file of settings; put it into a file of its" in said
        assert "hush" not in said

    def test_beside_users_are_refused(self) -> None:
        said = refusal({"users_file": "/u"}, {"KVHEARTH_STORE_PASSWORD": "hush"})
        assert said.startswith("--users-file: there are both a users file and a password; unset KVHEARTH")
        assert "hush" not in said


def test_a_life_for_all_values_is_read_too_where_nothing_lies_below(yaml_file: Any) -> None:
    assert read_settings({}, {}, yaml_file("default_ttl_seconds: 3600")).default_ttl_seconds == 3600.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("capcity: 1GiB", "store.yaml: 'capcity' is not a setting; did you mean capacity?"),
        ("max-value: 1GiB", "store.yaml: 'max-value' is not a setting; did you mean max_value?"),
        ("capacity_bytes: 1GiB", "'capacity_bytes' is not a setting; did you mean capacity?"),
        ("metrics_listen: 127.0.0.1:1", "'metrics_listen' is not a setting; did you mean http_listen?"),
        ("zzz: 1", "'zzz' is not a setting; see 'kvhearth store serve --help'"),
        ("1: 1", "'1' is not a setting"),
        ("capacity: lots", "store.yaml: capacity: 'lots' is not a size; write bytes or a number with a unit"),
        ("capacity: 1.5", "store.yaml: capacity: 1.5 is not a size"),
        ("capacity: true", "store.yaml: capacity: True is not a size"),
        ("capacity:", "store.yaml: capacity: None is not a size"),
        ("capacity: [1GiB]", "store.yaml: capacity: ['1GiB'] is not a size"),
        ("capacity: 1KiB", "store.yaml: capacity: 1024 bytes is too little; give at least 1MiB"),
        ("max_connections: many", "max_connections: 'many' is not a whole number; write digits only"),
        ("max_connections: 1.0", "max_connections: 1.0 is not a whole number"),
        ("max_connections: true", "max_connections: True is not a whole number"),
        ("max_connections: 0", "store.yaml: max_connections: 0 is too few; give at least 1"),
        ("idle_timeout_seconds: 5m", "idle_timeout_seconds: '5m' is not a number of seconds; write a number"),
        ("idle_timeout_seconds: .nan", "idle_timeout_seconds: nan is out of range"),
        ("insecure: maybe", "insecure: 'maybe' is not a yes or a no; write true or false"),
        ("policy: [lru]", "policy: ['lru'] is not text"),
        ("policy: mru", "store.yaml: policy: 'mru' is not known; one of"),
        ("write_mode: sideways", "write_mode: 'sideways' is not known; one of back, through"),
        ("disk: 7", "store.yaml: disk: 7 is not a path"),
        ("disk: /d", "disk_capacity: a disk tier has a bound; say how much"),
        ("object_url: http://x", "object_url: 'http://x' is not the address of an object store; write s3://"),
        ("object_endpoint: http://x", "object_endpoint: set without a bucket"),
        ("{object_url: s3://b, object_endpoint: x}", "object_endpoint: 'x' is not a URL"),
        ("tls_key: k", "tls_certificate: a certificate and its key go together; give both"),
        ("tls_client_ca: c", "store.yaml: tls_client_ca: clients' certificates need TLS"),
        ("{tls_key: k, tls_certificate: c, unix: /s}", "tls_certificate: TLS is for TCP only"),
        ("namespace_quota: 101%", "namespace_quota: '101%' is no share; write more than 0% and at most 100%"),
        ("namespace_quota: x%", "namespace_quota: 'x%' is no share"),
        ("group_quota: [1]", "group_quota: [1] is not a size; write a size such as 10GiB, or 25%"),
        ("quotas: 5GiB", "quotas: '5GiB' is not a mapping; write NAMESPACE: 10GiB"),
        ("quotas: {ns: lots}", "store.yaml: quotas.ns: 'lots' is not a size"),
        ("quotas: {00000012: 1GiB}", "quotas: 10 is read as a number; put the name in quotes"),
        ("quotas: {ns: 0}", "store.yaml: quotas: 'ns' with 0 bytes"),
        ("default_ttl_seconds: -1", "default_ttl_seconds: -1.0 is out of range; give 0 (none) to"),
        ("capacity: 1GiB\ncapacity: 2GiB", "store.yaml:2: not valid YAML: key 'capacity' twice"),
        ("capacity: [", "not valid YAML"),
        ("- capacity", "store.yaml: a list, not a mapping; write 'capacity: 64GiB'"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML: could not determine a constructor"),
        ("password_file: /nowhere", "store.yaml: password_file: cannot read /nowhere: No such file"),
    ],
)
def test_a_mistake_in_yaml_is_named_with_its_key_and_a_remedy(yaml_file: Any, text: str, complaint: str) -> None:
    said = refusal(file=yaml_file(text + "\n"))
    assert complaint in said


def test_an_empty_file_is_no_mistake_and_a_huge_one_is(yaml_file: Any) -> None:
    assert read_settings({}, {}, yaml_file("# nothing yet\n")) == StoreConfig()
    assert "more than 1 MiB" in refusal(file=yaml_file("#" * (MIB + 1)))


def test_mistakes_in_flags_and_variables_are_named_as_such() -> None:
    assert refusal({"capacity": "lots"}).startswith("--capacity: 'lots' is not a size")
    assert refusal({"listen": "0.0.0.0:1"}).startswith("--listen: 0.0.0.0:1 can be reached from other machines")
    environ = {"KVHEARTH_STORE_IDLE_TIMEOUT_SECONDS": "0"}
    assert refusal(environ=environ).startswith("KVHEARTH_STORE_IDLE_TIMEOUT_SECONDS: 0.0 is out of range")


def test_a_misspelt_variable_is_named_and_what_kubernetes_adds_is_not() -> None:
    said = refusal(environ={"KVHEARTH_STORE_CAPACTY": "1GiB"})
    assert said == "KVHEARTH_STORE_CAPACTY: not a setting; did you mean KVHEARTH_STORE_CAPACITY?"
    port = "KVHEARTH_STORE_PORT"
    kubernetes = [port, f"{port}_7420_TCP", f"{port}_7420_TCP_ADDR", f"{port}_7420_TCP_PORT", f"{port}_7420_TCP_PROTO"]
    kubernetes += ["KVHEARTH_STORE_SERVICE_HOST", "KVHEARTH_STORE_SERVICE_PORT", "KVHEARTH_STORE_SERVICE_PORT_HTTP"]
    ours = ["KVHEARTH_STORE_ADDRESS", "KVHEARTH_STORE_USER"]
    assert read_settings({}, dict.fromkeys([*kubernetes, *ours], "tcp://10.0.0.1:7420")) == StoreConfig()


def test_shares_are_of_the_capacity_wherever_that_comes_from() -> None:
    environ = {"KVHEARTH_STORE_NAMESPACE_QUOTA": "12.5%", "KVHEARTH_STORE_GROUP_QUOTA": "1MiB"}
    config = read_settings({"capacity": "8GiB"}, environ)
    assert (config.namespace_quota_bytes, config.group_quota_bytes) == (GIB, MIB)
