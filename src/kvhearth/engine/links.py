"""When modelled transfers end: one queue a link and direction, no clock. Shared by the emulator and the planner.

The GPU's link carries loads and saves, each direction with its own DMA queue, both at once; the store link carries
fetches and puts in the same way. Transfers of one queue run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable

from kvhearth.cost import CostModel
from kvhearth.engine.ports import Job, JobKind

DEFAULT_STORE_LINK = "ethernet-100g"


class ModelledLinks:
    """Says when a job that starts now will be done, and keeps each queue's backlog.

    Args:
        load_ns: bytes → ns that they occupy the link from engine DRAM into HBM.
        save_ns: bytes → ns that they occupy the link out of HBM.
        store_ns: bytes → ns from asking the store for them to having them, the latency included.
        store_latency_ns: of ``store_ns``, what does not occupy the link, so that jobs overlap in it; also what a lookup
            takes.
    """

    def __init__(
        self,
        load_ns: Callable[[int], int],
        save_ns: Callable[[int], int],
        store_ns: Callable[[int], int],
        store_latency_ns: int,
    ) -> None:
        self._durations = {
            JobKind.LOAD: (load_ns, 0),
            JobKind.SAVE: (save_ns, 0),
            JobKind.FETCH: (store_ns, store_latency_ns),
            JobKind.PUT: (store_ns, store_latency_ns),
        }
        self._free_ns = dict.fromkeys(JobKind, 0)
        self._store_latency_ns = store_latency_ns

    def done_ns(self, now_ns: int, job: Job) -> int:
        """Queue a job that starts at ``now_ns`` and say when it ends, in ns of the same clock."""
        duration_ns, latency_ns = self._durations[job.kind]
        done_ns = max(now_ns, self._free_ns[job.kind]) + duration_ns(job.nbytes)
        self._free_ns[job.kind] = done_ns - latency_ns
        return done_ns

    def lookup_ns(self, now_ns: int) -> int:
        """When a lookup in the store that is asked now is answered."""
        return now_ns + self._store_latency_ns


def modelled_links(cost: CostModel, store_link: str, chunk_bytes: int) -> ModelledLinks:
    """The links of one engine: the GPU's own, and ``store_link`` in operations of a chunk.

    Raises:
        UserError: no link of that name.
    """
    link = cost.link(store_link)
    return ModelledLinks(
        cost.dram_load_ns,
        cost.dram_save_ns,
        lambda nbytes: cost.transfer_ns(nbytes, link, chunk_bytes),
        link.latency_ns,
    )
