"""Which host this is, and who started this process: what ranks compare to find out who shares a machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path


def host_name() -> str:
    """The name of this host, without its domain."""
    return socket.gethostname().split(".")[0]


def host_identity() -> str:
    """Text that is equal for two processes exactly when they are on the same host.

    Two containers on one machine are two hosts, since each has its own network: name, boot of the machine and network
    namespace together tell them apart, and two processes in one container agree in all three.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/net").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def machine_identity() -> str:
    """Text that is equal for two processes exactly when one kernel runs them, in whatever containers; empty where there
    is no telling."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(boot.encode()).hexdigest()[:16]
    return ""


def usable_cpus() -> frozenset[int]:
    """The CPU numbers on which this process may run (mpirun and srun bind processes to some)."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def launcher_environment(mark: str) -> tuple[str, dict[str, str]] | None:
    """The nearest ancestor that was not started by the launcher: (its identity, the environment it started with).

    `mark` is a variable that the launcher sets in the processes it starts; the first ancestor without it is the
    launcher's own process on this host, whatever shells and wrappers are in between. Ranks of one job on one host get
    the same identity (process id and start time). None where /proc does not tell.
    """
    process = os.getppid()
    while process > 1:
        try:
            environment = _environment_of(process)
            # Fields after the command's name, which may hold spaces and parentheses: state, parent, ..., start time.
            stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        if mark not in environment:
            return f"{process}-{stat[19]}", environment
        process = int(stat[1])
    return None


def _environment_of(process: int) -> dict[str, str]:
    text = Path(f"/proc/{process}/environ").read_bytes().decode(errors="surrogateescape")
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
