"""Real vLLM engines in a Stack: what reads, where paths start, and what is refused, by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvhearth.errors import UserError
from kvhearth.stack import Stack, check_catalog, parse_stack

POOL = "pools: [{model: org/model, engine: vllm, %s}]"
VLLM = "pools: [{model: org/model, engine: vllm, vllm: {%s}}]"

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as a model has, whose block of 32 tokens is 256 KiB of KV."""
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def test_a_hugging_face_id_stays_and_a_directory_starts_from_the_file(model: Path, tmp_path: Path) -> None:
    def named(text: str) -> str:
        return parse_stack(f"pools: [{{engine: vllm, model: {text}}}]", directory=tmp_path).pools[0].model

    assert named("org/model") == "org/model"
    assert named("tiny") == named("./tiny") == named(str(model)) == str(model)
    assert named("../tiny") == str(tmp_path.parent / "tiny")
    emulated = parse_stack("pools: [{model: tiny}]", directory=tmp_path).pools[0]
    assert emulated.model == "tiny", "of the catalog, whatever lies beside the file"


def test_a_pool_is_named_after_its_directory(model: Path, tmp_path: Path) -> None:
    (pool,) = parse_stack("pools: [{engine: vllm, model: ./tiny}]", directory=tmp_path).pools
    assert pool.name == "tiny"


def test_an_interpreter_starts_from_the_file_and_stays_a_link(tmp_path: Path) -> None:
    """An environment is found by where its interpreter lies, and that is a link out of it."""
    (tmp_path / "env").mkdir()
    link = tmp_path / "env" / "python"
    link.symlink_to("/usr/bin/env")
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    for text, read in (("../env/python", str(link)), ("python3.12", "python3.12"), ("/opt/p", "/opt/p")):
        (pool,) = parse_stack(VLLM % f"python: {text}", directory=stacks).pools
        assert pool.vllm.python == read


def test_every_field_reads_back(model: Path) -> None:
    text = f"""
pools:
  - model: {model}
    engine: vllm
    block_size: 32
    offload: {{mode: shared, dram_size: 1GiB, dram_admission: lazy, store_admission: second-sight}}
    vllm: {{python: python3, version: "0.31", device: cpu, dtype: float32, seed: 7, enforce_eager: true,
      cpu_kvcache_space: 2GiB, hash_algo: xxhash_cbor, kv_events: true, start_seconds: 90,
      extra_args: [--no-async-scheduling, --stream-interval, "4"], env: {{HF_HUB_OFFLINE: "1"}}}}
store: {{}}
"""
    stack = parse_stack(text)
    check_catalog(stack)
    assert parse_stack(stack.to_yaml()) == stack
    assert stack.pools[0].vllm.cpu_kvcache_space == 2 << 30
    assert stack.pools[0].vllm.extra_args == ("--no-async-scheduling", "--stream-interval", "4")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (POOL % "vllm: {pyhton: x}", "pools[0].vllm.pyhton: unknown key; did you mean python?"),
        (VLLM % 'version: "0.30"', "pools[0].vllm.version: '0.30': want '0.31', '0.32' or '0.33'"),
        (
            POOL % "vllm: {device: cpu}",
            "pools[0].block_size: 16: vLLM on a CPU wants a multiple of 32; set block_size: 32",
        ),
        (
            VLLM % "cpu_kvcache_space: 1.5GiB",
            "pools[0].vllm.cpu_kvcache_space: '1.5GiB': want whole GiB, such as 4GiB, for vLLM reads no fractions",
        ),
        (
            VLLM % "extra_args: [--block-size=16]",
            "pools[0].vllm.extra_args: '--block-size=16': --block-size is set by kvhearth; set block_size instead",
        ),
        (
            VLLM % "extra_args: [--kv_transfer_config.kv_role, kv_both]",
            "pools[0].vllm.extra_args: '--kv_transfer_config.kv_role': --kv-transfer-config is set by kvhearth; "
            "set offload instead",
        ),
        (
            VLLM % "extra_args: [--kv-tr, x]",
            "pools[0].vllm.extra_args: '--kv-tr': --kv-transfer-config is set by kvhearth; set offload instead",
        ),
        (
            VLLM % "extra_args: [--port, '1']",
            "pools[0].vllm.extra_args: '--port': --port is set by kvhearth; leave it out",
        ),
        (
            VLLM % "extra_args: [--api-key, x]",
            "pools[0].vllm.extra_args: --api-key would show its secret to all users; "
            "engines listen on loopback; set router.api_key_file",
        ),
        (
            VLLM % "extra_args: [--hf-token=x]",
            "pools[0].vllm.extra_args: --hf-token would show its secret to all users; "
            "set HF_TOKEN where kvhearth is run",
        ),
        (VLLM % "env: {PYTHONHASHSEED: '1'}", "pools[0].vllm.env: PYTHONHASHSEED is set by kvhearth; leave it out"),
        (
            VLLM % "env: {HF_TOKEN: x}",
            "pools[0].vllm.env: HF_TOKEN: a Stack is no place for secrets; set it where kvhearth is run",
        ),
        (VLLM % "env: {'a b': x}", "pools[0].vllm.env: 'a b' is no name of an environment variable"),
        (
            "pools: [{model: m, offload: {mode: lmcache}}]",
            "pools[0].offload.mode: 'lmcache' is run, not emulated; set engine: vllm, or mode: native",
        ),
        (
            "pools: [{model: m, offload: {mode: native, store_admission: second-sight}}]",
            "pools[0].offload.store_admission: 'second-sight' is not emulated; "
            "set always, or engine: vllm which can do it",
        ),
        (
            "pools: [{model: x/config.json, engine: vllm}]",
            "pools[0].model: 'x/config.json' has no weights; engine: vllm wants the directory that it lies in",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_stack(text, where="f")
    assert str(caught.value) == f"f: {line}"


def test_a_flag_that_only_begins_like_one_of_ours_is_let_through() -> None:
    (pool,) = parse_stack(VLLM % "extra_args: [--model-impl, auto, --max-num-queued-reqs, '9', -O1]").pools
    assert pool.vllm.extra_args[0] == "--model-impl"


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    stack = parse_stack("pools: [{engine: vllm, model: ./none}]", directory=tmp_path)
    with pytest.raises(
        UserError, match=rf"^s: pools\[0\]\.model: no such directory: {tmp_path}/none; give the model's"
    ):
        check_catalog(stack, where="s")


def test_tiers_must_hold_a_chunk_where_the_models_shape_is_known(model: Path) -> None:
    def check(offload: str, dtype: str = "auto", store: str = "1GiB") -> None:
        pool = f"engine: vllm, model: {model}, block_size: 32, offload: {{{offload}}}, vllm: {{dtype: {dtype}}}"
        check_catalog(parse_stack(f"pools: [{{{pool}}}]\nstore: {{size: {store}}}"), where="s")

    check("mode: native, dram_size: 256KiB")
    with pytest.raises(UserError, match=r"offload\.dram_size: 256 KiB is less than one chunk \(512 KiB\)"):
        check("mode: native, dram_size: 256KiB", dtype="float32")
    with pytest.raises(UserError, match=r"^s: store\.size: 1 MiB is too little for chunks of 1 MiB"):
        check("mode: shared, blocks_per_chunk: 4", store="1MiB")


def test_what_cannot_be_known_beforehand_is_left_to_vllm(tmp_path: Path) -> None:
    check_catalog(parse_stack("pools: [{engine: vllm, model: org/unknown, gpu: none-such, offload: {mode: native}}]"))


def test_what_the_engine_does_not_read_is_warned_about() -> None:
    def warned(text: str) -> list[str]:
        return parse_stack(text).warnings()

    assert warned("pools: [{model: m, vllm: {seed: 1}}]") == ["pools[0].vllm has no effect with engine: emulated"]
    assert warned(POOL % "emulator: {time_scale: 2}") == ["pools[0].emulator has no effect with engine: vllm"]
    assert warned(POOL % "offload: {mode: native, store_admission: second-sight}") == [
        "pools[0].offload.store_admission has no effect in mode native"
    ]
    assert warned("pools: [{model: m, offload: {mode: native, lookup_timeout_seconds: 1}}]") == [
        "pools[0].offload.lookup_timeout_seconds has no effect with engine: emulated in mode native"
    ]
    assert warned(POOL % "offload: {mode: lmcache, dram_admission: lazy, blocks_per_chunk: 16}") == [
        "pools[0].offload.dram_admission has no effect in mode lmcache"
    ]
    assert warned(POOL % "offload: {mode: lmcache}") == [
        "pools[0].offload.blocks_per_chunk makes chunks of 16 tokens; LMCache's own default is 256"
    ]


def test_a_stack_of_python_values_is_the_same() -> None:
    stack = Stack.model_validate({"pools": [{"model": "org/model", "engine": "vllm"}]})
    assert stack == parse_stack("pools: [{model: org/model, engine: vllm}]")
