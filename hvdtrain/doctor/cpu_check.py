"""CPU cores and memory: what the machine has, what this process may use of it, and how many threads that gives."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import psutil

from hvdtrain.doctor.finding import Finding, ok, warn
from hvdtrain.doctor.limits_check import size
from hvdtrain.launch.host import usable_cpus
from hvdtrain.launch.threads import container_quota


@dataclasses.dataclass(frozen=True)
class CpuSeen:
    """`quota` is how many cores the control group grants, `memory_limit_bytes` its memory; None without a limit."""

    cores: int
    usable: int
    quota: float | None
    memory_bytes: int
    memory_limit_bytes: int | None


def probe_cpu() -> CpuSeen:
    """Ask the kernel and the control group."""
    return CpuSeen(
        cores=os.cpu_count() or 1,
        usable=len(usable_cpus()),
        quota=container_quota(),
        memory_bytes=psutil.virtual_memory().total,
        memory_limit_bytes=_memory_limit(),
    )


def check_cpu(seen: CpuSeen, environ: Mapping[str, str]) -> list[Finding]:
    """Cores, threads, memory.

    Args:
        seen: what the kernel says.
        environ: looked at for OMP_NUM_THREADS.
    """
    found = f"{seen.cores} cores"
    if seen.usable < seen.cores:
        found += f", this process may use {seen.usable} (affinity)"
    if seen.quota is not None:
        found += f", the container may use {seen.quota:g} (cgroup)"
    available = min(float(seen.usable), seen.quota or float(seen.usable))
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    cpu = ok("cpu", found)
    if asked.isdigit() and int(asked) > available:
        cure = "unset OMP_NUM_THREADS: each rank then gets its fair share of the cores"
        cpu = warn("cpu", f"{found}; OMP_NUM_THREADS={asked} is more than these", cure)
    elif asked:
        cpu = ok("cpu", f"{found}; OMP_NUM_THREADS={asked}")
    elif available < 2:
        cpu = warn("cpu", found, "two ranks will share one core: slow; give the container more (docker run --cpus)")
    memory = size(seen.memory_bytes)
    if seen.memory_limit_bytes is not None and seen.memory_limit_bytes < seen.memory_bytes:
        memory += f", the container may use {size(seen.memory_limit_bytes)} (cgroup)"
    return [cpu, ok("memory", memory)]


def _memory_limit() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # cgroup versions 2 and 1
        try:
            text = Path("/sys/fs/cgroup", name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None
