"""Engines of one machine get GPUs of their own."""

from __future__ import annotations

import pytest

from kvhearth.control.gpus import assign_gpus
from kvhearth.errors import UserError
from kvhearth.stack import Stack

STACK = Stack.model_validate(
    {
        "pools": [
            {"name": "big", "model": "a/b", "engine": "vllm", "tensor_parallel_size": 2, "replicas": 2},
            {"name": "small", "model": "a/c", "engine": "vllm"},
            {"name": "emulated", "model": "Llama-3.1-8B", "replicas": 2},
            {"name": "own", "model": "a/d", "engine": "vllm", "vllm": {"env": {"CUDA_VISIBLE_DEVICES": "7"}}},
        ]
    }
)


def test_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert assign_gpus(STACK, on_cpu=set(), where="f") == {"big-0": "0,1", "big-1": "2,3", "small-0": "4"}
    assert assign_gpus(STACK, on_cpu={"big"}, where="f") == {"small-0": "0"}


def test_those_named_around_kvhearth_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5e1,1,0,2")
    assert assign_gpus(STACK, on_cpu=set(), where="f") == {"big-0": "3,GPU-5e1", "big-1": "1,0", "small-0": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0,2")
    with pytest.raises(UserError, match=r"^f: small-0 would be given GPU number 5 of CUDA_VISIBLE_DEVICES=3,1,0,2"):
        assign_gpus(STACK, on_cpu=set(), where="f")
