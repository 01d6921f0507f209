"""Start, stop and place: `init`, `shutdown`, `rank` and the other questions about the job."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.hvd.common import process_sets
from hvdtrain.hvd.common.process_sets import ProcessSet
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.meet import meet
from hvdtrain.hvd.engine.request import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM
from hvdtrain.hvd.engine.settings import Settings

# Horovod's numbers: scripts print and compare them.
Average = AVERAGE
Sum = SUM
Adasum = ADASUM
Min = MIN
Max = MAX
Product = PRODUCT

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_engine: Engine | None = None
_exit_hook = False


def engine() -> Engine:
    """The running engine.

    Raises:
        ValueError: `init` was not called, or `shutdown` was.
    """
    if _engine is None:
        raise ValueError(_NOT_INITIALIZED)
    return _engine


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect this process to the others. Collective; a second call without `shutdown` does nothing.

    Args:
        comm: None, or the list of all ranks; communicators of MPI and sub-lists of ranks are not supported (use a
            process set).
        process_sets: process sets to register in this order, or "dynamic" to allow `add_process_set` later.

    Raises:
        ValueError: comm is something else; a process set is a duplicate, or differs between ranks.
        LaunchError: the ranks cannot find each other; the message says what is missing.
    """
    global _engine, _exit_hook
    if isinstance(process_sets, str) and process_sets.lower() == "dynamic":
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    if _engine is not None:
        return
    settings = Settings.from_environ()
    meeting = meet(settings.start_timeout_s)
    if comm is not None and list(_as_ranks(comm)) not in ([], list(range(meeting.world.size))):
        raise ValueError(
            f"init(comm={comm!r}): only the list of all {meeting.world.size} ranks can be given; for a part of them "
            "pass hvd.ProcessSet(ranks) in process_sets"
        )
    _engine = Engine(meeting.world, meeting.store, meeting.address, settings)
    if not _exit_hook:
        atexit.register(shutdown)
        _exit_hook = True
    if settings.timeline and settings.timeline.upper() != "DYNAMIC":
        start_timeline(settings.timeline, settings.timeline_cycles)
    _register_process_sets(list(process_sets or []))


def _register_process_sets(requested: list[Any]) -> None:
    world = engine().world
    process_sets.global_process_set.ranks = list(range(world.size))
    for index, process_set in enumerate(requested):
        if process_set.ranks is None:
            raise ValueError(
                f"process_sets[{index}]: a process set must be given as a list of ranks, not an MPI communicator"
            )
        number = process_sets.register(process_set.ranks)
        process_set.process_set_id = number
        if number is None:
            raise ValueError(
                f"Horovod could not be initialized because process_sets entry number {index} is a duplicate: "
                f"{process_set}"
            )


def _as_ranks(comm: Any) -> Sequence[int]:
    try:
        return list(comm)
    except TypeError:
        raise ValueError(
            "Invalid type of argument comm. Expected list of rank integers; MPI communicators are not supported, "
            "because hvdtrain.hvd does not use MPI."
        ) from None


def shutdown() -> None:
    """Disconnect. Operations that are still open fail on every rank; `init` may be called again afterwards."""
    global _engine
    if _engine is None:
        return
    stopping, _engine = _engine, None
    stopping.close()


def is_initialized() -> bool:
    """Whether `init` was called and `shutdown` was not."""
    return _engine is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a Chrome trace of all negotiations and operations, on rank 0.

    Raises:
        ValueError: not initialized.
    """
    running = engine()
    if running.world.rank == 0:
        running.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Finish the trace.

    Raises:
        ValueError: not initialized.
    """
    engine().timeline.stop()


def size() -> int:
    """Number of ranks."""
    return engine().world.size


def local_size() -> int:
    """Number of ranks on this host."""
    return engine().world.local_size


def cross_size() -> int:
    """Number of hosts that have a rank with this local rank."""
    return sum(1 for ranks in engine().local_sizes_by_node if ranks > engine().world.local_rank)


def rank() -> int:
    """This process's number among all."""
    return engine().world.rank


def local_rank() -> int:
    """This process's number among those on its host."""
    return engine().world.local_rank


def cross_rank() -> int:
    """This host's number among those that have a rank with this local rank."""
    running = engine()
    before = running.local_sizes_by_node[: running.world.node_rank]
    return sum(1 for ranks in before if ranks > running.world.local_rank)


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return len(set(engine().local_sizes_by_node)) == 1


def mpi_threads_supported() -> bool:
    """Raises ValueError: MPI carries nothing here."""
    raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_enabled() -> bool:
    """False: MPI carries nothing here, whichever launcher started the job."""
    return False


def mpi_built() -> bool:
    """False: hvdtrain.hvd is not built, and does not use MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether torch's gloo carries host tensors: always."""
    return gloo_built()


def gloo_built() -> bool:
    """Whether this torch has gloo."""
    return bool(dist.is_gloo_available())


def nccl_built() -> int:
    """NCCL's version as a number (21903 is 2.19.3), 0 where this torch has none or no GPU is there."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """False: IBM DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built with ROCm."""
    return torch.version.hip is not None


def average_or_op(op: int | None, average: bool | None) -> int:
    """The operation meant by the present argument `op` and its predecessor `average`.

    Raises:
        ValueError: both were given.
    """
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        return op
    if average is None:
        return Average
    warnings.warn(
        "Parameter `average` has been replaced with `op` and will be removed in v1.0", DeprecationWarning, stacklevel=3
    )
    return Average if average else Sum
