"""The tiny models: the same bytes for the same seed, loadable by what serves them, and two KV groups where promised."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from kvhearth.connector.tiny_models import Kind, make_tiny_model
from kvhearth.errors import UserError

KINDS: tuple[Kind, ...] = ("llama", "sliding-window")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """One of each kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(kind, folder / kind) for kind in KINDS}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(models: dict[Kind, Path], tmp_path: Path) -> None:
    again = make_tiny_model("llama", tmp_path / "again")
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    assert contents(again) == contents(models["llama"])
    for name in ("model.safetensors", "tokenizer.json"):
        assert (other / name).read_bytes() != (again / name).read_bytes()


def test_made_twice_it_is_left_as_it_is(models: dict[Kind, Path]) -> None:
    weights = models["llama"] / "model.safetensors"
    before = weights.stat()
    assert make_tiny_model("llama", models["llama"]) == models["llama"]
    assert weights.stat() == before
    assert not [path for path in models["llama"].parent.iterdir() if path.name.startswith(".")]


def test_another_model_or_folder_in_its_place_is_refused_and_kept(models: dict[Kind, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"out: .*is not this tiny model; remove it"):
        make_tiny_model("sliding-window", models["llama"])
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="is not this tiny model"):
        make_tiny_model("llama", tmp_path)
    assert contents(tmp_path) == {"mine.txt": b"precious"}


def test_an_unknown_kind_and_a_negative_seed_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="kind: no tiny model of kind 'gpt'; use one of llama, sliding-window"):
        make_tiny_model("gpt", tmp_path / "m")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed: seed -1 is below 0"):
        make_tiny_model("llama", tmp_path / "m", seed=-1)
    assert not list(tmp_path.iterdir())


def test_several_makers_at_once_end_with_one_whole_model(models: dict[Kind, Path], tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def make() -> None:
        try:
            make_tiny_model("llama", tmp_path / "shared")
        except BaseException as error:  # whatever it is, the test is to show it
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert contents(tmp_path / "shared") == contents(models["llama"])
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_tokenizer_and_config(models: dict[Kind, Path], kind: Kind) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models[kind])
    config = AutoConfig.from_pretrained(models[kind])
    assert len(tokenizer) == config.vocab_size == 4096
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    text = "Grunal stel, größer than 日本 and\n\ttabs"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<bos><|user|>hello<|end|><|assistant|>"
    assert tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"]) == [4, 6]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_that_the_config_calls_for_is_there(models: dict[Kind, Path], kind: Kind) -> None:
    config = json.loads((models[kind] / "config.json").read_text())
    with safe_open(models[kind] / "model.safetensors", "np") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    layers = config["num_hidden_layers"]
    assert len(shapes) == 3 + 9 * layers
    assert shapes["lm_head.weight"] == (config["vocab_size"], config["hidden_size"])
    assert shapes[f"model.layers.{layers - 1}.self_attn.k_proj.weight"] == (
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    )
    assert 20e6 < sum(rows * (rest[0] if rest else 1) for rows, *rest in shapes.values()) < 25e6


_ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
settings = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 160, "max_model_len": 1024}
llm = LLM(sys.argv[1], enforce_eager=True, **settings)
groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
layers = [len(group.layer_names) for group in groups]
params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True)
output = llm.generate([{"prompt_token_ids": list(range(100, 900))}], params, use_tqdm=False)[0].outputs[0]
logprobs = [next(iter(step.values())).logprob for step in output.logprobs]
print(json.dumps([windows, layers, len(output.token_ids), logprobs]))
"""


@pytest.mark.timeout(300)
def test_vllm_serves_the_sliding_window_model_with_two_kv_cache_groups(models: dict[Kind, Path]) -> None:
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE, str(models["sliding-window"])],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **own, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    windows, layers, tokens, logprobs = json.loads(done.stdout.splitlines()[-1])
    assert sorted(windows, key=lambda window: window or 0) == [None, 512]
    assert layers == [4, 4]
    assert tokens == 4
    assert all(-8 < logprob < -0.2 for logprob in logprobs)  # neither flat (-8.3 at 4,096 tokens) nor all on one


def test_the_command_says_where_the_model_is_or_what_is_wrong(models: dict[Kind, Path]) -> None:
    command = [sys.executable, "-m", "kvhearth.connector.tiny_models", "--out", str(models["llama"])]
    made = subprocess.run([*command, "--kind", "llama"], capture_output=True, text=True, timeout=60, check=False)
    assert (made.returncode, made.stdout) == (0, f"{models['llama']}\n")
    wrong = subprocess.run(
        [*command, "--kind", "sliding-window"], capture_output=True, text=True, timeout=60, check=False
    )
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
    assert "is not this tiny model; remove it" in wrong.stderr
