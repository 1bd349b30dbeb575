"""Beside a connector that moves KV from a prefill engine straight into HBM: what it moved also lands in the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from .rig import BLOCK, Rig, tokens
from .servers import StoreProcess

PROMPT = tokens(1, 10 * BLOCK + 3)


class _Moves(KVConnectorMetadata):
    def __init__(self, moves: list[tuple[str, list[int], int]]) -> None:
        self.moves = moves


class Mover(KVConnectorBase_V1, SupportsHMA):
    """Stands for NIXL, which needs hardware of its own: brings whole prompts, asynchronously, for requests that ask."""

    write: ClassVar[Callable[[str, Sequence[int], int], None]]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._moves: list[tuple[str, list[int], int]] = []
        self._arrived: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._moves.append((request.request_id, list(blocks.get_block_ids()[0]), num_external_tokens))
            request.kv_transfer_params = None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta, self._moves = _Moves(self._moves), []
        return meta

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, block_ids, count in self._get_connector_metadata().moves:
            type(self).write(name, block_ids, count)
            self._arrived.add(name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        arrived, self._arrived = self._arrived, set()
        return None, arrived or None

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None


BESIDE = {"kv_connector": "Mover", "kv_connector_module_path": __name__, "kv_role": "kv_both"}


@pytest.mark.parametrize("admission", ["eager", "lazy"])
def test_blocks_that_the_other_connector_overwrites_are_saved_before(admission: str) -> None:
    """vLLM does not tell us of the blocks it allocates for the other connector's loads."""
    with Rig(blocks=40, dram_chunks=400, beside=BESIDE, extra={"dram_admission": admission}) as rig:
        Mover.write = rig.write
        for turn in range(12):
            rig.submit(f"plain{turn}", tokens(turn % 4, 200), 3)
            rig.submit(f"moved{turn}", tokens(100 + turn, 210), 3, params={"do_remote_prefill": True})
            for _ in range(turn % 5):
                rig.step()
        rig.finish()
        rig.forget_hbm()
        assert [rig.run(f"again{turn}", tokens(turn, 200)) for turn in range(4)] == [12 * BLOCK] * 4


def test_what_was_moved_also_lands_in_the_store(store: StoreProcess) -> None:
    with Rig(store=store.address, beside=BESIDE) as decode:
        Mover.write = decode.write
        assert decode.run("moved", PROMPT, 8, params={"do_remote_prefill": True}) == len(PROMPT)
        assert store.count() == 10
        decode.forget_hbm()
        assert decode.run("local", PROMPT) == 10 * BLOCK  # from DRAM
    with Rig(store=store.address) as other:
        assert other.run("again", PROMPT) == 10 * BLOCK
