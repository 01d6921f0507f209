"""Join and barrier: ranks wait for each other."""

from __future__ import annotations

from hvdtrain.hvd import basics
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.engine.request import Entry, Kind
from hvdtrain.hvd.handles import _set_number


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Until then the other ranks go on with allreduces and optimizer steps, to which this rank contributes zeros;
    averages still divide by the number of all ranks.

    Args:
        device: ignored; zeros are made where the others' tensors are.

    Returns:
        The rank that joined last.

    Raises:
        HorovodInternalError: another rank has shut down or was lost.
    """
    return basics.engine().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the set is here. Operations that are still in flight are not waited for."""
    engine = basics.engine()
    number = _set_number(process_set, Kind.BARRIER, None)
    name = f"{Kind.BARRIER.value}.{engine.auto_name(Kind.BARRIER, number)}"
    engine.submit(Entry(Kind.BARRIER, name, number, [])).wait()
