"""The demo on real engines, without vLLM: its stacks, its workload and its reading of vLLM's metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvhearth.control.demo_vllm import (
    Counts,
    ModeRun,
    Steps,
    conversations,
    counts_of,
    make_model,
    measure_modes,
    stack_of_mode,
    verdict,
    write_report,
)
from kvhearth.cost.verdict import ORDER
from kvhearth.errors import UserError
from kvhearth.planner.workload import prompt_of
from kvhearth.stack import Stack, check_catalog

from .vllm_stand_in import environment

PAGE = """
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 11061.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 8064.0
# TYPE vllm:prompt_tokens_cached_by_source counter
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="device"} 8064.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="host"} 3936.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="disk"} 2.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="external_unspecified"} 10464.0
# TYPE vllm:kv_offload_load_bytes counter
vllm:kv_offload_load_bytes_total{engine="0",model_name="tiny"} 2.359296e+08
# TYPE kvhearth_connector_get_bytes counter
kvhearth_connector_get_bytes_total{engine="0",model_name="tiny"} 1.74063616e+08
"""

NOTHING = Counts(0, 0, 0, 0, 0, 0, 0, 0, 0)


def test_an_engines_page_is_read_and_what_it_does_not_show_is_nothing() -> None:
    assert counts_of(PAGE) == Counts(3, 8064, 3936, 10464, 11061, 235_929_600, 0, 174_063_616, 0)
    assert counts_of("") == NOTHING


@pytest.mark.parametrize("mode", ORDER)
def test_the_stacks_are_ones_that_a_file_could_hold(mode: str, tmp_path: Path) -> None:
    stack = stack_of_mode(mode, sys.executable, tmp_path)
    check_catalog(stack)
    assert stack.warnings() == []
    assert Stack.model_validate(stack.model_dump()) == stack
    assert (stack.store is not None) == (mode == "shared")


def test_what_users_come_back_to_does_not_fit_hbm_and_each_request_does() -> None:
    workload = conversations()
    pool = stack_of_mode("none", sys.executable, Path("/")).pools[0]
    assert pool.max_model_len is not None
    assert pool.num_gpu_blocks_override is not None
    tokens_a_word = 4.3  # of the demo's tokenizer, as measured
    assert workload.longest_tokens * tokens_a_word < pool.max_model_len
    last = sum(len(list(user.turns)) and prompt_words(user.turns) for user in workload.users)
    hbm_tokens = 2 * pool.num_gpu_blocks_override * pool.block_size
    assert last * tokens_a_word > 1.5 * hbm_tokens
    assert workload.requests == 8 * 4


def prompt_words(turns: object) -> int:
    """Words of a user's whole conversation."""
    conversation: tuple[object, ...] = ()
    for turn in turns:  # type: ignore[attr-defined]
        conversation = prompt_of(conversation, turn)  # type: ignore[arg-type]
    return sum(segment.tokens for segment in conversation)  # type: ignore[attr-defined]


def test_an_interpreter_that_cannot_make_the_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^--python: /none/python cannot make the demo's model: .*; give the interpreter"
    ):
        make_model("/none/python", tmp_path / "model")
    with pytest.raises(UserError, match="/bin/false cannot make the demo's model: no output"):
        make_model("/bin/false", tmp_path / "model")


def test_modes_are_measured_one_after_the_other_behind_the_real_router(tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    told: list[str] = []
    steps = Steps(lambda mode: told.append(f"start {mode}"), lambda mode: told.append(f"ready {mode}"))
    runs = measure_modes(
        conversations(users=2, turns=1), lambda mode: stack_of_mode(mode, str(python), tmp_path), steps, ("none",)
    )
    assert told == ["start none", "ready none"]
    run = runs["none"]
    assert (run.requests, run.errors, run.first_error) == (2, 0, None)
    assert run.throughput_tokens_per_second > 0
    assert run.counts.compute_tokens == 3 * 2, "what was counted before the workload is left out"
    assert run.counts._replace(compute_tokens=0) == NOTHING


def run(throughput: float) -> ModeRun:
    return ModeRun(1, 0, throughput, 0.1, 0.2, 3.0, NOTHING, None)


def test_the_verdict_and_the_report_rest_on_what_was_measured(tmp_path: Path) -> None:
    measured = {"none": run(100.0), "native": run(150.0), "shared": run(151.0)}
    assert verdict(measured).mode == "native"
    path = write_report(conversations(), measured, tmp_path)
    page = json.loads(path.read_text())
    assert page["verdict"]["mode"] == "native"
    assert page["measured"]["shared"]["throughput_tokens_per_second"] == 151.0
    assert page["measured"]["shared"]["counts"]["store_tokens"] == 0
    assert page["setup"]["engines"] == 2
