"""What the figures of a benchmark depend on: the machine and the job, for the reader of the table."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores, memory (GiB), kernel and versions of the machine that this process runs on."""
    versions = {}
    for name in ("hvdtrain", "torch", "horovod"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def machine_text(found: dict[str, Any]) -> str:
    """`machine()` for people."""
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "horovod") if name in found)
    return (
        f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB, Linux {found['kernel']}, "
        f"Python {found['python']}, {versions}"
    )


def shown(job: dict[str, Any]) -> dict[str, Any]:
    """The keys of a job that say what was measured."""
    return {
        key: job[key]
        for key in ("task", "task_options", "batch_size", "accumulate", "compression", "precision", "device")
        if key in job
    }


def job_text(job: dict[str, Any]) -> str:
    """`shown()` for people."""
    options = ", ".join(f"{key}: {value}" for key, value in (job.get("task_options") or {}).items())
    batch = job["batch_size"] or "as the data come"
    return f"`{job['task']}`" + (f" ({options})" if options else "") + f", batch {batch} per rank and microbatch"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return platform.machine()
