"""Keeping a rank on one core, and letting its data-loader workers go where it may not."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

# The CPUs that a rank gave up; tells its workers, however they are started.
GIVEN_UP_VARIABLE = "HVDTRAIN_CPUS"


def own_core(machine_cpus: Sequence[frozenset[int]], machine_rank: int, num_threads: int, quota: float | None) -> int:
    """The core that is this rank's where every rank of the machine can have exactly one; -1 anywhere else.

    Args:
        machine_cpus: the CPUs that each rank of this machine may use, in whatever container it is.
        machine_rank: this rank's place among them.
        num_threads: with which this rank computes.
        quota: CPUs that this container's limit leaves for all its ranks together; None: no limit.
    """
    cpus = machine_cpus[machine_rank]
    nobody_is_bound = all(other == cpus for other in machine_cpus)
    if quota is not None or not nobody_is_bound or len(cpus) != len(machine_cpus) or len(cpus) < 2 or num_threads != 1:
        return -1
    return sorted(cpus)[machine_rank]


def stay_on(core: int, environ: MutableMapping[str, str]) -> None:
    """Keep this thread, and threads and processes that it starts from now on, on one core."""
    environ[GIVEN_UP_VARIABLE] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.sched_setaffinity(0, {core})


def roam_again(environ: Mapping[str, str]) -> None:
    """Undo `stay_on`, in this thread: for the end, and for a worker that its rank has started."""
    if given_up := environ.get(GIVEN_UP_VARIABLE):
        os.sched_setaffinity(0, {int(cpu) for cpu in given_up.split(",")})
