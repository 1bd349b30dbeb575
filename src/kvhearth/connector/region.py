"""The engine's DRAM for chunks, ``/dev/shm/vllm_offload_<engine>.mmap``: room for it, and nothing left behind.

vLLM's workers and scheduler map one file. Once all have, its name is not needed: without one, the kernel frees the
memory when the last process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from kvhearth.errors import UserError
from kvhearth.units import format_bytes

SHM = Path("/dev/shm")  # noqa: S108 - vLLM's choice
_OURS = 0o1600
"""Mode of a region that `hold` has marked; the sticky bit means nothing on a file."""

_log = logging.getLogger(__name__)


def region_path(engine_id: str) -> Path:
    """vLLM's name for an engine's region."""
    return SHM / f"vllm_offload_{engine_id}.mmap"


def check_room(engine_id: str, nbytes: int, *, shm: Path = SHM) -> None:
    """Before a region is made. Raises UserError when shared memory has no room for it."""
    path = shm / region_path(engine_id).name
    if path.exists() or not shm.is_dir():
        return
    free = shutil.disk_usage(shm).free
    if nbytes > free:
        raise UserError(
            f"{format_bytes(nbytes)} for KV in DRAM, but {shm} has {format_bytes(free)} free",
            where="kv_connector_extra_config.cpu_bytes_to_use",
            remedy="lower it, or give the container more shared memory (docker: --shm-size or --ipc=host; Kubernetes: "
            f"an emptyDir of medium Memory at {shm})",
        )


def check_chunks(num_chunks: int, cpu_bytes: int, chunk_bytes: int) -> None:
    """Raises UserError when DRAM is too small to be of use."""
    if num_chunks < 2:
        raise UserError(
            f"{format_bytes(cpu_bytes)} hold {num_chunks} chunks of {format_bytes(chunk_bytes)}",
            where="kv_connector_extra_config.cpu_bytes_to_use",
            remedy="raise it to hold many chunks, or lower blocks_per_chunk",
        )


def remove_stale(engine_id: str, *, shm: Path = SHM) -> bool:
    """Remove the region of an engine that was killed while it started, so that this one does not join it.

    A file older than the parent of this process (the engine's front end, or the engine itself) is of an earlier start.
    True when one was removed.
    """
    path = shm / region_path(engine_id).name
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # two workers that look at once remove it once
        found = os.fstat(descriptor)
        born = _started_at(os.getppid())
        if born is None or found.st_ctime >= born:
            return False
        with contextlib.suppress(FileNotFoundError):
            named = os.stat(path)
            if (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino):
                os.unlink(path)
                _log.warning("removed %s, left by an engine of this id that was killed", path)
                return True
        return False
    finally:
        os.close(descriptor)


def hold(region: Any) -> None:
    """Mark a region as one of ours that is in use, from its creation until its name goes: see `sweep`."""
    fcntl.flock(region.fd, fcntl.LOCK_SH)  # ends with the process, however it ends
    os.fchmod(region.fd, _OURS)


def sweep(*, shm: Path = SHM) -> int:
    """Remove regions of ours that nobody uses: their engines were killed while they warmed up. How many there were."""
    removed = 0
    for path in shm.glob("vllm_offload_*.mmap*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                found = os.fstat(descriptor)
                if stat.S_IMODE(found.st_mode) != _OURS:
                    continue  # of an engine without us, which does not say whether it lives
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                named = os.stat(path)
                if (named.st_dev, named.st_ino) == (found.st_dev, found.st_ino):
                    os.unlink(path)
                    removed += 1
                    _log.warning("removed %s, left by an engine that was killed", path)
            finally:
                os.close(descriptor)
    return removed


def unlink_name(engine_id: str) -> None:
    """Everybody has mapped the region: take its name away (from vLLM 0.33 on, those of its segments)."""
    path = region_path(engine_id)
    for name in path.parent.glob(f"{glob.escape(path.name)}*"):
        name.unlink(missing_ok=True)


def expect_no_name(region: Any) -> None:
    """vLLM's region removes its name when it is cleaned up; here the name is gone long before."""
    clean_up = region.cleanup

    def cleanup() -> None:
        region._creator = region._creator and os.path.exists(region.mmap_path)
        clean_up()

    region.cleanup = cleanup


def _started_at(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None when it cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text(encoding="ascii").splitlines() if line[:5] == "btime")
    except (OSError, StopIteration, UnicodeDecodeError):
        return None
    return float(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
