"""Process sets: operations among a part of the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


class ProcessSet:
    """A set of ranks that runs operations of its own, once it was passed to `init` or `add_process_set`.

    Args:
        ranks_or_comm: the ranks, in any order.

    Attributes:
        process_set_id: a number while registered, else None.
        ranks: the ranks in ascending order.

    Raises:
        ValueError: not a list of integers (communicators of MPI are not supported).
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        try:
            ranks = sorted(ranks_or_comm)
        except TypeError:
            raise ValueError(
                "ProcessSet should be initialized with a list of process ranks; MPI communicators are not supported, "
                "because hvdtrain.hvd does not use MPI"
            ) from None
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks")
        self.ranks = ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Number of ranks, or None while not registered."""
        if self.process_set_id is None:
            return None
        return len(self._members())

    def rank(self) -> int | None:
        """This process's number within the set, or None while not registered.

        Raises:
            ValueError: this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        own = _engine().world.rank
        members = self._members()
        if own not in members:
            raise ValueError("Process is not part of provided process set.")
        return int(members.index(own))

    def included(self) -> bool | None:
        """Whether this process is in the set, or None where its ranks are not known."""
        if self.ranks is None:
            return None
        return _engine().world.rank in self.ranks

    def _members(self) -> tuple[int, ...]:
        members = _engine().sets.get(self.process_set_id)
        if members is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return tuple(members)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def _engine() -> Any:
    # At call time: basics imports this module.
    from hvdtrain.hvd import basics

    return basics.engine()


def register(ranks: Sequence[int]) -> int | None:
    """Give these ranks a number. Collective over all ranks; None where a set of the same ranks exists.

    Raises:
        ValueError: a rank is out of range, or there are none.
        HorovodInternalError: the ranks were called with different lists.
    """
    from hvdtrain.hvd.engine.request import Entry, Kind

    engine = _engine()
    size = engine.world.size
    if not ranks or any(not 0 <= rank < size for rank in ranks) or len(set(ranks)) != len(ranks):
        raise ValueError(f"a process set needs ranks from 0 to {size - 1}, each once; {list(ranks)} was given")
    name = f"{Kind.ADD_SET.value}.{engine.auto_name(Kind.ADD_SET, 0)}"
    number = engine.submit(Entry(Kind.ADD_SET, name, 0, [sorted(ranks)])).wait()
    return None if number < 0 else int(number)


def _check_dynamic(what: str) -> None:
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0") in ("", "0"):
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {what} process sets after Horovod initialization."
        )


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, members or not; needs HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Raises:
        ValueError: not allowed, not initialized, or a set of these ranks exists.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _engine()
    _check_dynamic("adding")
    assert process_set.ranks is not None
    number = register(process_set.ranks)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set. Collective over all ranks; needs HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Returns:
        Whether it was removed: False for the global set and for one that is not registered.
    """
    from hvdtrain.hvd.engine.request import Entry, Kind

    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    engine = _engine()
    _check_dynamic("removing")
    process_set._invalidate()
    name = f"{Kind.REMOVE_SET.value}.{engine.auto_name(Kind.REMOVE_SET, 0)}"
    removed = engine.submit(Entry(Kind.REMOVE_SET, name, 0, [number])).wait()
    return bool(removed >= 0)
