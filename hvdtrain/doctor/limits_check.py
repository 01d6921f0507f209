"""Shared memory, process limits, disk: what ends a job in its third hour with `Bus error`."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
from pathlib import Path

from hvdtrain.doctor.finding import Finding, absent, fault, ok, warn

# Docker gives 64 MB unless told otherwise. Below that not even one worker's batches fit.
_SHM_NEEDED_BYTES = 64 * 2**20
_SHM_GOOD_BYTES = 512 * 2**20
# A rank holds some 50 files and sockets, and two for each peer and each tensor in flight from a data-loader worker.
_FILES_NEEDED = 256
_FILES_GOOD = 4096
_DISK_NEEDED_BYTES = 100 * 2**20
_DISK_GOOD_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class LimitsSeen:
    """Sizes in bytes; None where there is no such thing (no /dev/shm) or no limit (memlock)."""

    shm_bytes: int | None
    shm_free_bytes: int
    open_files: int
    memlock_bytes: int | None
    infiniband: bool
    disk_folder: str
    disk_free_bytes: int
    disk_writable: bool = True


def probe_limits(shm: str = "/dev/shm", folder: str = ".") -> LimitsSeen:
    """Ask the kernel.

    Args:
        shm: where shared memory is.
        folder: where the run's output would go.
    """
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    usage = shutil.disk_usage(shm) if Path(shm).is_dir() else None
    return LimitsSeen(
        shm_bytes=usage.total if usage else None,
        shm_free_bytes=usage.free if usage else 0,
        open_files=files if files != resource.RLIM_INFINITY else 2**31,
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        infiniband=Path("/dev/infiniband").is_dir() and any(Path("/dev/infiniband").glob("uverbs*")),
        disk_folder=str(Path(folder).resolve()),
        disk_free_bytes=shutil.disk_usage(folder).free,
        disk_writable=os.access(folder, os.W_OK),
    )


def check_limits(seen: LimitsSeen) -> list[Finding]:
    """Shared memory, open files, locked memory, disk."""
    return [_check_shm(seen), _check_files(seen), _check_memlock(seen), _check_disk(seen)]


def _check_shm(seen: LimitsSeen) -> Finding:
    cure = "docker run --shm-size=2g (or --ipc=host); on a host: mount -o remount,size=2G /dev/shm"
    if seen.shm_bytes is None:
        return fault("/dev/shm", "there is none: data-loader workers, NCCL and MPI need it", cure)
    found = f"{size(seen.shm_bytes)}, {size(seen.shm_free_bytes)} free"
    if seen.shm_bytes < _SHM_NEEDED_BYTES:
        return fault("/dev/shm", f"{found}: data-loader workers and NCCL die of it with `Bus error`", cure)
    if seen.shm_free_bytes < _SHM_NEEDED_BYTES and seen.shm_bytes >= _SHM_GOOD_BYTES:
        return fault("/dev/shm", f"{found}: it is full", "ls -l /dev/shm: delete what dead processes left there")
    if seen.shm_bytes < _SHM_GOOD_BYTES:
        return warn("/dev/shm", f"{found}: too little for num_workers > 0 with large batches", cure)
    return ok("/dev/shm", found)


def _check_files(seen: LimitsSeen) -> Finding:
    found = f"at most {seen.open_files} open files per process"
    if seen.open_files < _FILES_NEEDED:
        return fault("open files", found, "ulimit -n 65536 (for good: /etc/security/limits.conf, nofile)")
    if seen.open_files < _FILES_GOOD:
        cure = "ulimit -n 65536, if workers say `Too many open files`"
        return ok("open files", f"{found}; with many workers or ranks: {cure}")
    return ok("open files", found)


def _check_memlock(seen: LimitsSeen) -> Finding:
    if seen.memlock_bytes is None:
        return ok("locked memory", "no limit")
    found = f"at most {size(seen.memlock_bytes)} per process"
    if seen.infiniband:
        cure = "ulimit -l unlimited (docker run --ulimit memlock=-1; limits.conf: memlock)"
        return fault("locked memory", f"{found}: InfiniBand registers more than that", cure)
    return absent("locked memory", f"{found}; matters with InfiniBand alone, and there is none here")


def _check_disk(seen: LimitsSeen) -> Finding:
    found = f"{size(seen.disk_free_bytes)} free in {seen.disk_folder}"
    cure = "make room, or use another folder: hvdtrain train --output DIR"
    if seen.disk_free_bytes < _DISK_NEEDED_BYTES:
        return fault("disk", f"{found}: too little for checkpoints", cure)
    if not seen.disk_writable:
        return absent("disk", f"{found}, not writable", "hvdtrain train --output DIR")
    if seen.disk_free_bytes < _DISK_GOOD_BYTES:
        return warn("disk", found, cure)
    return ok("disk", found)


def size(num_bytes: int) -> str:
    """A number of bytes as people write it: 1.0 MB, 24.0 GB (of 1024)."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
