"""CPU threads per rank: the cores this rank may use, shared fairly with the other ranks of its host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from hvdtrain.launch.host import launcher_environment, usable_cpus
from hvdtrain.launch.world import World


def fair_threads(cpus: frozenset[int], local_cpus: Sequence[frozenset[int]], quota: float | None = None) -> int:
    """Threads for a rank that may run on `cpus`, at least one.

    A core that k ranks of the host may use counts 1/k. So ranks that share all cores get cores / local_size each, and
    ranks that were bound to cores of their own keep all of these.

    Args:
        local_cpus: the CPU set of every rank of this host, this one included.
        quota: CPUs that the container's limit leaves for all ranks of the host together; None: no limit.
    """
    share = sum(1 / max(1, sum(cpu in other for other in local_cpus)) for cpu in cpus)
    if quota is not None:
        share = min(share, quota / max(1, len(local_cpus)))
    return max(1, int(share + 1e-6))


def user_threads(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS where the user set it.

    torchrun sets it to 1 for more than one rank per host where it is unset, and leaves no sign in its ranks. But the
    torchrun process itself was started without it, which /proc tells; where that is not readable, a 1 counts as
    torchrun's.
    """
    value = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if not value.isdigit() or int(value) < 1:
        return None
    if value == "1" and environ.get("TORCHELASTIC_RUN_ID"):
        started = launcher_environment("TORCHELASTIC_RUN_ID")
        if started is None or "OMP_NUM_THREADS" not in started[1]:
            return None
    return int(value)


def container_quota() -> float | None:
    """CPUs that the control group of this container may use at once (cgroup version 2), or None without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def choose_threads(
    world: World,
    environ: Mapping[str, str],
    *,
    cpus: frozenset[int] | None = None,
    local_cpus: Sequence[frozenset[int]] | None = None,
) -> int:
    """Threads for this rank: the user's OMP_NUM_THREADS, else its fair share of the cores.

    Args:
        cpus: where this process may run; asked of the kernel if None.
        local_cpus: the same for every rank of this host (`Rendezvous.local_cpus`); if None all of them share `cpus`.
    """
    chosen = user_threads(environ)
    if chosen is not None:
        return chosen
    cpus = usable_cpus() if cpus is None else cpus
    return fair_threads(cpus, local_cpus or [cpus] * world.local_size, container_quota())


def set_threads(
    world: World,
    environ: MutableMapping[str, str] | None = None,
    *,
    local_cpus: Sequence[frozenset[int]] | None = None,
) -> int:
    """Set this process's CPU threads (torch, if it is imported, and OMP_NUM_THREADS for its children); return them."""
    environ = os.environ if environ is None else environ
    threads = choose_threads(world, environ, local_cpus=local_cpus)
    environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
    return threads
