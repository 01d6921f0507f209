"""From tensors to announcements, and from handles (numbers, as in Horovod) to results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.hvd import basics
from hvdtrain.hvd.basics import Adasum
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.engine.request import Entry, Kind, dtype_name

_numbers = itertools.count(1)
_open: dict[int, Entry] = {}


def keep(entry: Entry) -> int:
    """Give an announced operation a handle."""
    handle = next(_numbers)
    _open[handle] = entry
    return handle


def forget_all() -> None:
    """Drop all handles (a new generation begins)."""
    _open.clear()


def poll(handle: int) -> bool:
    """Whether the operation has finished, so that `synchronize` would not block."""
    entry = _open.get(handle)
    return entry is None or entry.done


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its tensor (a tuple of tensors for grouped operations).

    A handle that is not known, because it was synchronized before, gives None.

    Raises:
        HorovodInternalError: the operation failed, or the ranks disagree about it.
    """
    entry = _open.pop(handle, None)
    return None if entry is None else entry.wait()


def submit(
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    tensors: Sequence[torch.Tensor],
    outputs: list[torch.Tensor] | None,
    *,
    single: bool,
    varying: Any = None,
    op: int | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int | None = None,
    splits: torch.Tensor | None = None,
) -> int:
    """Announce one operation on one tensor, or on a group that is done all together or not at all.

    Raises:
        ValueError: not initialized, the process set is not registered or does not include this rank, the tensors are
            on several devices, or the name is in flight.
    """
    engine = basics.engine()
    number = _set_number(process_set, kind, name)
    if not tensors:
        raise ValueError(f"{kind.value}: an empty list of tensors was given")
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{kind.value} {name or ''}: the tensors of a group are on several devices: {sorted(devices)}")
    if any(tensor.is_sparse for tensor in tensors):
        raise ValueError(f"Tensor type {tensors[0].type()} is not supported; see sparse_allreduce_async.")
    full = f"{kind.value}.{name if name is not None else engine.auto_name(kind, number)}"
    inputs = [tensor.detach() for tensor in tensors]
    strict: list[Any] = [[dtype_name(t.dtype) for t in inputs], [_shape(kind, t) for t in inputs], devices.pop()]
    if op is not None:
        strict += [op, prescale, postscale]
    if root is not None:
        strict += [root]
    entry = Entry(
        kind, full, number, strict, varying=varying, inputs=inputs, outputs=outputs, single=single,
        op=op if op is not None else basics.Sum, prescale=prescale, postscale=postscale, root=root or 0, splits=splits,
    )  # fmt: skip
    return keep(engine.submit(entry))


def _set_number(process_set: ProcessSet, kind: Kind, name: str | None) -> int:
    number = process_set.process_set_id
    engine = basics.engine()
    if number is None or number not in engine.sets:
        raise ValueError(f"{kind.value} {name or ''}: {process_set} is not registered; see hvd.add_process_set()")
    if engine.world.rank not in engine.sets[number]:
        raise ValueError(
            f"{kind.value} {name or ''}: rank {engine.world.rank} is not in {process_set}, and cannot take part"
        )
    return number


def _shape(kind: Kind, tensor: torch.Tensor) -> list[int] | None:
    shape = list(tensor.shape)
    if kind in (Kind.ALLGATHER, Kind.ALLTOALL):
        return shape[1:] if shape else None
    if kind is Kind.REDUCESCATTER and not shape:
        return None
    return shape


def check_adasum(op: int, process_set: ProcessSet) -> None:
    """Adasum pairs ranks along a binary tree.

    Raises:
        NotImplementedError: not the global process set, or not a power of two of ranks.
    """
    if op != Adasum:
        return
    if process_set is not global_process_set and process_set.process_set_id != 0:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    size = basics.size()
    if size & (size - 1):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
