"""Stack files: what reads back, and what each kind of mistake is told, on one line with field, value and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvhearth.errors import UserError
from kvhearth.stack import Stack, parse_stack, stack_schema

EXAMPLES = Path(__file__).parents[2] / "examples"

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
words = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20)
powers = st.sampled_from([1, 2, 4, 8, 16])


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with any subset of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


offloads = maybe(
    mode=st.sampled_from(["none", "native", "shared"]),
    dram_size=st.one_of(st.integers(1, 2**50), st.sampled_from(["64GiB", "1.5GiB", "200GB"])),
    blocks_per_chunk=st.integers(1, 1024),
)
emulators = maybe(
    time_scale=st.floats(0.001, 1000),
    stream_interval=st.integers(1, 100),
    store_bytes_scale=st.integers(1, 4096),
    store_link=words,
)
pools = st.tuples(
    st.fixed_dictionaries({"model": words, "name": names}),
    maybe(
        gpu=words,
        served_model_name=words,
        replicas=st.integers(1, 64),
        tensor_parallel_size=powers,
        block_size=powers,
        max_num_seqs=st.integers(1, 1024),
        max_num_batched_tokens=st.integers(1024, 65536),
        max_model_len=st.integers(1, 2**20),
        offload=offloads,
        emulator=emulators,
    ),
    st.one_of(
        st.just({}), maybe(gpu_memory_utilization=st.floats(0.01, 1)), maybe(num_gpu_blocks_override=st.just(2**20 + 2))
    ),
).map(lambda parts: parts[0] | parts[1] | parts[2])
stacks = st.fixed_dictionaries(
    {
        "pools": st.lists(pools, min_size=1, max_size=3, unique_by=lambda pool: pool["name"]),
        "store": maybe(size=st.integers(2**20, 2**50), listen=st.sampled_from([None, "127.0.0.1:7", "[::1]:0"])),
    },
    optional={
        "name": names,
        "router": maybe(
            policy=st.sampled_from(["prefix", "least-loaded", "round-robin"]), listen=st.just("localhost:80")
        ),
    },
)


@settings(max_examples=50, deadline=None)
@given(stacks)
def test_any_stack_written_as_yaml_reads_back_equal(data: dict[str, Any]) -> None:
    stack = Stack.model_validate(data)
    assert parse_stack(stack.to_yaml()) == stack


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_reads_fits_the_catalog_and_has_nothing_odd(path: Path) -> None:
    stack = Stack.from_yaml(path)
    assert stack.warnings() == []
    assert parse_stack(stack.to_yaml()) == stack


def test_five_lines_are_enough_for_a_useful_stack() -> None:
    text = "pools:\n  - model: Llama-3.1-8B\n    replicas: 2\n    offload: {mode: shared}\nstore: {size: 1GiB}\n"
    stack = parse_stack(text)
    assert [engine.name for engine in stack.engines()] == ["llama-3-1-8b-0", "llama-3-1-8b-1"]
    assert stack.router.listen == "127.0.0.1:8000"
    assert stack.store is not None
    assert stack.store.size == 2**30


def test_paths_in_a_file_start_from_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_text("pools: [{model: my-model/config.json}]\nrouter: {api_key_file: key}")
    stack = parse_stack(path.read_bytes(), directory=tmp_path)
    assert stack.pools[0].model == str(tmp_path / "my-model" / "config.json")
    assert stack.pools[0].name == "my-model"
    assert stack.router.api_key_file == str(tmp_path / "key")


POOL = "pools: [{model: m, %s}]"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "f.yaml: empty, not a mapping; start from examples/minimal.yaml"),
        ("[1]", "f.yaml: a list, not a mapping; start from examples/minimal.yaml"),
        ("a: b: c", "f.yaml:1: not valid YAML: mapping values are not allowed here; correct that line"),
        ("name: a\npools: []\nname: b", "f.yaml:3: not valid YAML: key 'name' twice; correct that line"),
        ("pools: []", "f.yaml: pools: want 1 to 32 pools, not 0"),
        ("pools: 3", "f.yaml: pools: 3: want a list"),
        ("pools: [5]", "f.yaml: pools[0]: 5: want a mapping"),
        ("pools: [{}]", "f.yaml: pools[0].model: missing; it has no default, so set it"),
        ("name: x", "f.yaml: pools: missing; it has no default, so set it"),
        (POOL % "ofload: {}", "f.yaml: pools[0].ofload: unknown key; did you mean offload?"),
        (POOL % "offload: {mod: native}", "f.yaml: pools[0].offload.mod: unknown key; did you mean mode?"),
        (
            POOL % "offload: {zzz: 1}",
            "f.yaml: pools[0].offload.zzz: unknown key; "
            "known here: blocks_per_chunk, dram_admission, dram_size, lookup_timeout_seconds, mode, store_admission",
        ),
        (
            POOL % "offload: {mode: fast}",
            "f.yaml: pools[0].offload.mode: 'fast': want 'none', 'native', 'shared' or 'lmcache'",
        ),
        (POOL % "offload: shared", "f.yaml: pools[0].offload: 'shared': want a mapping"),
        (
            POOL % "offload: {mode: shared}",
            "f.yaml: pools[0].offload.mode: 'shared' needs a store; add a section store: {size: 1GiB}, or use native",
        ),
        (
            POOL % "offload: {dram_size: 4 cows}",
            "f.yaml: pools[0].offload.dram_size: '4 cows': "
            "write bytes or a number with a unit, such as 512MiB, 2GiB or 10GB",
        ),
        (POOL % "engine: sglang", "f.yaml: pools[0].engine: 'sglang': want 'emulated' or 'vllm'"),
        (POOL % "replicas: 0", "f.yaml: pools[0].replicas: 0: want at least 1"),
        (POOL % "block_size: 17", "f.yaml: pools[0].block_size: 17: want a power of two, such as 16"),
        (POOL % "name: A B", "f.yaml: pools[0].name: 'A B': want lower case letters, digits and dashes"),
        (
            POOL % "max_num_batched_tokens: 8",
            "f.yaml: pools[0].max_num_batched_tokens: 8 is less than max_num_seqs (256); "
            "a step must have a token for each running request: raise it, or lower max_num_seqs",
        ),
        (
            POOL % "num_gpu_blocks_override: 101, max_model_len: 1601",
            "f.yaml: pools[0].max_model_len: 1601 tokens do not fit 101 blocks of 16 (one stays empty); "
            "lower it to 1600, or raise num_gpu_blocks_override",
        ),
        (
            POOL % "num_gpu_blocks_override: 9, gpu_memory_utilization: 0.5",
            "f.yaml: pools[0].gpu_memory_utilization: set together with num_gpu_blocks_override; keep one of the two",
        ),
        (
            "pools: [{model: a}, {model: a}]",
            "f.yaml: pools[1].name: 'a' is the name of two pools; give each pool its own name",
        ),
        (
            "pools: [{model: a}]\nrouter: {listen: '0.0.0.0:80'}",
            "f.yaml: router.listen: '0.0.0.0:80' is reachable from other machines and there is no API key; "
            "set api_key_file, or listen at 127.0.0.1",
        ),
        (
            "pools: [{model: a}]\nstore: {listen: '10.0.0.1:80'}",
            "f.yaml: store.listen: '10.0.0.1:80': reachable from other machines, and the stack's own store "
            "serves this one; listen at 127.0.0.1, or run `kvhearth store serve` with a password and put its address "
            "into the printed command",
        ),
        (
            "pools: [{model: a}]\nrouter: {listen: '127.0.0.1:99999'}",
            "f.yaml: router.listen: '127.0.0.1:99999': want host:port with a port of 0 to 65535, "
            "such as 127.0.0.1:8000 (port 0 picks a free one)",
        ),
        (
            "pools: [{model: a}]\nrouter: {listen: 'gateway:80'}",
            "f.yaml: router.listen: 'gateway:80': host 'gateway' is neither an IP address nor localhost",
        ),
        (
            "pools: [{model: a}]\nstore: {listen: 'localhost:7'}\nrouter: {listen: '127.0.0.1:7'}",
            "f.yaml: store.listen: 127.0.0.1:7 is router.listen too; give each its own port, or 0 for a free one",
        ),
        (
            f"pools: [{{model: a}}]\nstore: {{unix: /{'x' * 99}}}",
            f"f.yaml: store.unix: '/{'x' * 58}…: 100 bytes long; a unix socket's path has at most 99",
        ),
        (
            POOL % "replicas: many, block_size: x",
            "f.yaml: pools[0].replicas: 'many': "
            "want a valid integer, unable to parse string as an integer (and 1 more)",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_stack(text, where="f.yaml")
    assert str(caught.value) == line


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00", b"? [a]: b", b"a: &x [*x]", b"a: 2020-99-99"])
def test_what_is_no_text_or_no_plain_yaml_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "stack.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"stack\.yaml"):
        Stack.from_yaml(path)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_whatever_raise_anything_but_a_user_error(content: bytes) -> None:
    with pytest.raises(UserError):
        parse_stack(content)


def test_a_missing_file_and_a_huge_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read it: No such file"):
        Stack.from_yaml(tmp_path / "none.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (2 << 20))
    with pytest.raises(UserError, match="more than 1 MiB"):
        Stack.from_yaml(tmp_path / "huge.yaml")


def test_the_schema_refuses_unknown_keys_and_offers_the_modes() -> None:
    schema = stack_schema()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Pool"]["additionalProperties"] is False
    assert schema["$defs"]["Offload"]["properties"]["mode"]["enum"] == ["none", "native", "shared", "lmcache"]
    assert schema["required"] == ["pools"]
    assert schema["$defs"]["Pool"]["required"] == ["model"]
