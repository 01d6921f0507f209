"""Horovod where the ranks of a machine have to share its cores.

Horovod waits for a result in a loop that never sleeps (`WaitAndClear` in its mpi_ops_v2.cc), and its background threads
look for work every millisecond. With a core for every rank that is quick. With 16 ranks on two cores it takes the time
of the rank that everyone waits for: a step of MNIST that takes native DDP 0.1 s took 8 s. So there, and only there,
ranks sleep between two looks.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from hvdtrain.launch.threads import container_quota

# A rank looks again when it has slept this share of the time that it has waited, within these bounds.
SHARE = 0.2
SHORTEST_S = 0.00005
LONGEST_S = 0.005
CYCLE_MS_PER_RANK_AND_CORE = 1.0


def ranks_per_core(machine_cpus: Sequence[frozenset[int]], num_local: int, quota: float | None = None) -> float:
    """How many ranks share a core here.

    Args:
        machine_cpus: the CPUs that each rank of this machine may use, in whatever container it is.
        num_local: ranks in this container.
        quota: CPUs that this container's limit leaves for all its ranks together; None: no limit.
    """
    shared = len(machine_cpus) / max(1, len(frozenset().union(*machine_cpus)))
    return shared if quota is None else max(shared, num_local / max(1.0, quota))


class SharedCores:
    """Makes Horovod give way while it is open. Changes nothing where every rank has a core."""

    def __init__(self, machine_cpus: Sequence[frozenset[int]], num_local: int) -> None:
        self._load = ranks_per_core(machine_cpus, num_local, container_quota())
        self._library: Any = None
        self._spin: Callable[[int], None] | None = None

    def prepare(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Before ``hvd.init()``: let its background threads look less often, unless the user has said how often."""
        if self._load > 1:
            environ = os.environ if environ is None else environ
            environ.setdefault("HOROVOD_CYCLE_TIME", f"{CYCLE_MS_PER_RANK_AND_CORE * self._load:g}")

    def open(self) -> None:
        """After ``hvd.init()``: sleep while waiting."""
        if self._load > 1:
            self._library = importlib.import_module("horovod.torch.mpi_ops").mpi_lib
            self._spin = self._library.horovod_torch_wait_and_clear
            self._library.horovod_torch_wait_and_clear = self._wait

    def close(self) -> None:
        """As it was before."""
        if self._library is not None:
            self._library.horovod_torch_wait_and_clear = self._spin
            self._library = None

    def _wait(self, handle: int) -> None:
        begin = time.monotonic()
        while not self._library.horovod_torch_poll(handle):
            waited_s = time.monotonic() - begin
            time.sleep(min(LONGEST_S, max(SHORTEST_S, SHARE * waited_s)))
        assert self._spin is not None
        # It is ready: this raises what went wrong, or returns at once.
        self._spin(handle)
