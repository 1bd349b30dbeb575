"""What the connector relies on of vLLM, looked up in the source of every supported version; and 0.31 at work.

0.32 is the version that all other tests run with. ``install.sh`` lays 0.31 and the source of 0.33 beside it.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .servers import StoreProcess

_V1 = "distributed/kv_transfer/kv_connector/v1"
RELIED_ON: dict[str, dict[str, list[str]]] = {
    "v1/kv_offload/tiering/base.py": {
        "SecondaryTierManager": [
            "__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)",
            "lookup(key, req_context)",
            "submit_store(job_metadata)",
            "submit_load(job_metadata)",
            "get_finished_jobs()",
            "on_new_request(req_context)",
            "on_request_finished(req_context)",
            "on_schedule_end(context)",
            "drain_jobs()",
            "shutdown()",
            "build_metric_definitions(extra_config)",
            "get_stats()",
        ],
        "TransferJob": ["job_id", "keys", "chunk_ids", "req_context"],
        "JobResult": ["job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"],
    },
    "v1/kv_offload/base.py": {
        "ReqContext": [
            "req_id",
            "kv_transfer_params",
            "set_state(val)",
            "get_state(cls)",
            "set_offload_key_position(key, end_token)",
            "get_offload_key_position(key)",
        ],
        "OffloadingWorker": [
            "submit_store(job_id, src_spec, dst_spec)",
            "submit_load(job_id, src_spec, dst_spec)",
            "get_finished()",
            "wait(job_ids)",
            "shutdown()",
        ],
        "TransferResult": ["job_id", "success", "transfer_size", "transfer_time"],
        "GPULoadStoreSpec": ["__init__(block_ids, group_sizes, block_indices)"],
        "RequestOffloadingContext": ["policy"],
        "ScheduleEndContext": ["preempted_req_ids"],
        "LookupResult": ["MISS", "HIT", "RETRY"],
        "OffloadPolicy": ["CHUNK_LEVEL", "REQUEST_LEVEL"],
        "CanonicalPageMapping": ["runs", "canonical_page_size_bytes", "is_writer(block_id)"],
    },
    "v1/kv_offload/tiering/spec.py": {
        "TieringOffloadingSpec": [
            "get_manager()",
            "_scheduler_mmap",
            "_engine_id",
            "_validate_canonical_refs(kv_caches)",
        ],
    },
    "v1/kv_offload/cpu/spec.py": {
        "CPUOffloadingSpec": ["get_worker(kv_caches)", "num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker"],
    },
    "v1/kv_offload/cpu/shared_offload_region.py": {
        "SharedOffloadRegion": [
            "__init__(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size)",
            "create_next_worker_view(tensor_page_size)",
            "create_next_canonical_view(tensor_page_size)",
            "cleanup()",
            "_creator",
            "fd",
            "mmap_path",
        ],
    },
    f"{_V1}/offloading/scheduler.py": {
        "OffloadingConnectorScheduler": [
            "__init__(spec, vllm_config, kv_cache_config)",
            "on_new_request(request)",
            "build_connector_meta(scheduler_output)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "request_finished(request)",
            "reset_cache()",
            "_build_store_jobs(scheduler_output)",
            "_calc_num_offloadable_tokens(req_status, num_computed_tokens)",
            "_generate_job_id()",
            "_req_status",
            "_jobs",
            "_block_id_to_pending_jobs",
            "_current_batch_allocated_block_ids",
            "_current_batch_jobs_to_flush",
        ],
        "RequestOffloadState": [
            "storable_chunks(group_config, group_state, num_offloadable_tokens)",
            "group_states",
            "transfer_jobs",
            "finished_signaled",
            "req_context",
        ],
        "TransferJobStatus": ["req_id", "pending_count", "keys", "is_store", "fenced_block_ids"],
        "RequestGroupState": ["offload_keys", "block_ids", "next_stored_chunk_idx"],
    },
    f"{_V1}/offloading/common.py": {"TransferJob": ["req_id", "src_spec", "dst_spec"]},
    f"{_V1}/offloading_connector.py": {"OffloadingConnector": ["__init__(vllm_config, role, kv_cache_config)"]},
    f"{_V1}/base.py": {"KVConnectorBase_V1": ["bind_gpu_block_pool(gpu_block_pool)", "get_kv_connector_stats()"]},
    "v1/core/kv_cache_utils.py": {"FreeKVCacheBlockQueue": ["fake_free_list_head", "fake_free_list_tail"]},
    "v1/core/block_pool.py": {
        "BlockPool": [
            "get_new_blocks(num_blocks)",
            "free_block_queue",
            "cached_block_hash_to_block",
            "blocks",
            "num_gpu_blocks",
        ]
    },
}
_ROOT = Path(sys.prefix)
TREES = {"0.32": None, "0.31": _ROOT / "vllm-0.31" / "vllm", "0.33": _ROOT / "vllm-0.33" / "vllm"}


def _tree(version: str) -> Path:
    place = TREES[version]
    if place is None:
        import vllm

        assert vllm.__version__.startswith(version)
        return Path(vllm.__file__).parent
    return place


@functools.cache
def _classes(file: Path) -> dict[str, dict[str, list[str] | None]]:
    """Class name -> its methods (with argument names) and attributes (None), those set on ``self`` included."""
    found: dict[str, dict[str, list[str] | None]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef):
            continue
        members: dict[str, list[str] | None] = {}
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                members[inner.name] = [
                    a.arg for a in (*inner.args.posonlyargs, *inner.args.args, *inner.args.kwonlyargs)
                ]
            elif isinstance(inner, ast.AnnAssign | ast.Assign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        members.setdefault(target.id, None)
                    elif isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                        members.setdefault(target.attr, None)
        found[node.name] = members
    return found


@pytest.mark.parametrize("version", TREES)
def test_everything_that_the_connector_relies_on_is_there(version: str) -> None:
    missing = []
    for path, classes in RELIED_ON.items():
        known = _classes(_tree(version) / path)
        for name, members in classes.items():
            for member in members:
                method, _, arguments = member.rstrip(")").partition("(")
                have = known.get(name, {}).get(method, "absent")
                wanted = [argument.strip() for argument in arguments.split(",") if argument.strip()]
                if have == "absent" or not set(wanted) <= set(have or []):
                    missing.append(f"{path}: {name}.{member} (have {have})")
    assert not missing, "\n".join(missing)


def test_the_check_would_notice_a_change(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("class A:\n    def f(self, x): self.y = 1\n")
    assert _classes(file) == {"A": {"f": ["self", "x"], "y": None}}


def _with_0_31(*argv: str, timeout: float) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(_tree("0.31").parent)}
    return subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.timeout(600)
def test_0_31_takes_from_dram_and_from_the_store_what_was_computed(store: StoreProcess) -> None:
    script = Path(__file__).with_name("engine_0_31.py")
    ran = _with_0_31(str(script), store.address, timeout=500)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "0.31" in ran.stdout.splitlines()[-1]
