"""Makes small models with random weights that vLLM serves on two CPU cores: for tests and benchmarks of offloading.

They say nothing sensible; what they have is real attention over a real KV cache, sensitive to every byte of it. Made
from a seed on the spot, nothing is downloaded:  python -m kvhearth.connector.tiny_models --kind llama --out DIR
Serve them with `--dtype float32`: vLLM's `auto` casts to bfloat16, which takes CPUs without AVX-512 ten times as long.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvhearth.errors import UserError

Kind = Literal["llama", "sliding-window"]

_REVISION = 1
_MARK = "kvhearth_tiny_model.json"
_HIDDEN = 512
_INTERMEDIATE = 1024
_LAYERS = 8
_HEADS = 8
_KV_HEADS = 4
_HEAD_DIM = 64
_VOCABULARY = 4096
_MAX_POSITIONS = 8192
_WINDOW = 512
_SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Attention scores of standard deviation 2.5 leave a handful of positions with most of the weight, and logits of
# standard deviation 2 are neither flat nor all on one token: a change in any row of KV moves log-probabilities.
_SCORE_STD = 2.5
_LOGIT_STD = 2.0


def make_tiny_model(kind: Kind, out: Path | str, seed: int = 0) -> Path:
    """Write a model folder that vLLM and transformers load, unless the same one is there already.

    Both kinds are Llamas of 23 M float32 parameters: 8 layers of 4 KV heads of 64, so 16 KiB of KV a token. In
    `sliding-window` every other layer sees only the last 512 tokens, which gives vLLM two KV cache groups of 4 layers,
    hence blocks of half the bytes and about twice as many of them for a request. The same kind and seed give the same
    bytes.

    Args:
        kind: `llama` or `sliding-window`.
        out: the folder to make; its parents are made too. Made aside and renamed, so it is whole or absent.
        seed: of the weights and of the text that the tokenizer is trained on; 0 or more.

    Raises:
        UserError: an unknown kind, a seed below 0, a folder that holds something else, or a missing library.
    """
    if kind not in get_args(Kind):
        raise UserError(
            f"no tiny model of kind {kind!r}", where="kind", remedy=f"use one of {', '.join(get_args(Kind))}"
        )
    if seed < 0:
        raise UserError(f"seed {seed} is below 0", where="seed", remedy="use 0 or more")
    folder = Path(out).absolute()
    mark = {"kind": kind, "seed": seed, "revision": _REVISION}
    if _is_made(folder, mark):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_model(aside, kind, seed)
        _write_json(aside / _MARK, mark)
        aside.chmod(0o755)  # readable by others, as any folder is; mkdtemp and safetensors make theirs private
        (aside / "model.safetensors").chmod(0o644)
        try:
            aside.rename(folder)
        except OSError:
            if not _is_made(folder, mark):  # else another process was quicker, with the same bytes
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _is_made(folder: Path, mark: dict[str, Any]) -> bool:
    """Whether this very model is there; an absent or empty folder is not, anything else is the user's to move."""
    try:
        if json.loads((folder / _MARK).read_text()) == mark:
            return True
    except FileNotFoundError:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return False
    except (NotADirectoryError, ValueError):
        pass
    raise UserError(
        f"{folder} is there and is not this tiny model", where="out", remedy="remove it, or choose another folder"
    )


def _write_model(folder: Path, kind: Kind, seed: int) -> None:
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise _missing("safetensors") from error
    _write_tokenizer(folder, seed)
    _write_json(folder / "config.json", _config(kind))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    )
    save_file(_weights(seed), str(folder / "model.safetensors"), metadata={"format": "pt"})


def _config(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": _MAX_POSITIONS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": _VOCABULARY,
    }
    if kind == "sliding-window":
        config["layer_types"] = ["sliding_attention", "full_attention"] * (_LAYERS // 2)
        config["sliding_window"] = _WINDOW
    return config


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Every tensor by its Hugging Face name. Rows of unit-variance inputs give outputs of variance gain squared."""
    rng = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    sharp = _SCORE_STD**0.5
    weights = {
        "model.embed_tokens.weight": matrix(_VOCABULARY, _HIDDEN, _HIDDEN**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(_VOCABULARY, _HIDDEN, _LOGIT_STD),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN, sharp),
            f"{prefix}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN, sharp),
            f"{prefix}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": ones,
            f"{prefix}.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
        }
    return weights


def _write_tokenizer(folder: Path, seed: int) -> None:
    """A byte-level BPE tokenizer of exactly the model's vocabulary, trained on words made of seeded syllables."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise _missing("tokenizers") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(seed), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": _MAX_POSITIONS,
            "chat_template": _CHAT_TEMPLATE,
        },
    )


def _text(seed: int) -> list[str]:
    """Lines of made-up words, some frequent and some rare, so that the trainer finds as many merges as it needs."""
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    onsets, vowels, codas = ("b", "ch", "d", "f", "gr", "k", "l", "m", "n", "pl", "r", "st", "t", "v"), "aeiou", "nrsl"
    syllables = [onset + vowel + coda for onset in onsets for vowel in vowels for coda in ("", *codas)]
    lengths = rng.integers(1, 4, size=8_000)
    words = ["".join(syllables[i] for i in rng.integers(0, len(syllables), size=n)) for n in lengths]
    ranks = rng.zipf(1.2, size=60_000) % len(words)
    sentence = [words[rank] for rank in ranks] + words
    return [" ".join(sentence[at : at + 12]).capitalize() + "." for at in range(0, len(sentence), 12)]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def _missing(package: str) -> UserError:
    return UserError(
        f"the Python package {package} is not installed",
        where="tiny model",
        remedy=f"run this with the Python that has vLLM, which brings it, or pip install {package}",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvhearth.connector.tiny_models", description=__doc__)
    parser.add_argument("--kind", required=True, choices=get_args(Kind))
    parser.add_argument("--out", required=True, type=Path, help="the folder to make")
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokenizer (default 0)")
    given = parser.parse_args(arguments)
    try:
        print(make_tiny_model(given.kind, given.out, given.seed))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
