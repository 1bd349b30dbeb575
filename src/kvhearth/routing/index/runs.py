"""How far a prompt reaches on each target, read off the masks of its blocks. Pure functions of what `index` knows."""

from __future__ import annotations

from collections.abc import Sequence

from kvhearth.routing.index.places import Place, Target
from kvhearth.routing.ports import Hits


def leading_hits(masks: Sequence[int], targets: Sequence[Target | None]) -> list[Hits]:
    """For each target (None = unknown: nothing), its leading hits in blocks.

    Args:
        masks: for each block of the prompt in order, the bits of the places that hold it.
        targets: whom to ask for.
    """
    runs = _hbm_runs(masks, targets)
    answers = []
    for target in targets:
        if target is None:
            answers.append(Hits())
            continue
        hbm = runs[target.hbm.bit]
        if hbm < len(masks) and (target.dram.blocks or target.pool.store.blocks):
            answers.append(Hits(hbm, *_restorable(masks, hbm, target.dram, target.pool.store)))
        else:
            answers.append(Hits(hbm))
    return answers


def _hbm_runs(masks: Sequence[int], targets: Sequence[Target | None]) -> dict[int, int]:
    """HBM's bit of each target → leading blocks that it holds or soon will; all targets in one pass."""
    alive = 0
    for target in targets:
        if target is not None:
            alive |= target.hbm.bit
    runs: dict[int, int] = {}
    for at, mask in enumerate(masks):
        still = alive & (mask | mask >> 1)  # a guess's bit is the one above HBM's
        if still != alive:
            _end(runs, alive ^ still, at)
            alive = still
            if not alive:
                break
    _end(runs, alive, len(masks))
    return runs


def _end(runs: dict[int, int], bits: int, at: int) -> None:
    while bits:
        lowest = bits & -bits
        runs[lowest] = at
        bits ^= lowest


def _restorable(masks: Sequence[int], start: int, dram: Place, store: Place) -> tuple[int, int]:
    """Blocks from ``start`` on without a gap that whole chunks bring back: from DRAM, or else from the store. A chunk
    that begins in HBM counts for what is missing of it.
    """
    dram_bit, dram_chunk = dram.bit, dram.chunk_blocks
    store_bit, store_chunk = store.bit, store.chunk_blocks
    from_dram = from_store = 0
    at, end = start, len(masks)
    while at < end:
        last = at + dram_chunk - at % dram_chunk
        if last <= end and masks[last - 1] & dram_bit:
            from_dram += last - at
            at = last
            continue
        last = at + store_chunk - at % store_chunk
        if last > end or not masks[last - 1] & store_bit:
            break
        from_store += last - at
        at = last
    return from_dram, from_store
