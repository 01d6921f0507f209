"""Alltoall: each rank sends a slice of its rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.engine.request import Kind
from hvdtrain.hvd.handles import submit, synchronize


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to exchange rows.

    Args:
        tensor: at least one dimension; the first may differ between ranks.
        splits: how many rows go to each rank of the set, in its order; None for equal shares.
        name: matches the tensors of the ranks; see `allreduce_async`.
        process_set: the ranks that take part.

    Returns:
        A handle; `synchronize` gives the received rows and how many came from each rank.

    Raises:
        ValueError: the splits are not integers, not one per rank, negative, or exceed the rows; or there are none and
            the rows cannot be shared equally.
    """
    size = process_set.size()
    if size is None:
        raise ValueError(f"alltoall {name or ''}: {process_set} is not registered; see hvd.add_process_set()")
    rows = int(tensor.shape[0]) if tensor.dim() else 0
    given: torch.Tensor | None = None
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall {name or ''}: {rows} rows cannot be shared equally among {size} ranks; pass splits"
            )
        counts = [rows // size] * size
    else:
        given = splits if isinstance(splits, torch.Tensor) else torch.tensor(splits, dtype=torch.int32)
        if given.is_floating_point() or given.dtype == torch.bool:
            raise ValueError(f"alltoall {name or ''}: splits must be integers, not {given.dtype}")
        counts = [int(count) for count in given.tolist()]
        if len(counts) != size or min(counts, default=0) < 0 or sum(counts) > rows:
            raise ValueError(
                f"alltoall {name or ''}: splits {counts} must be one count of at least 0 for each of the {size} ranks, "
                f"and together at most the {rows} rows of the tensor"
            )
    return submit(Kind.ALLTOALL, name, process_set, [tensor], None, single=True, varying=counts, splits=given)


class HorovodAlltoall(torch.autograd.Function):
    """The gradient of an alltoall is the alltoall back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set = process_set
        ctx.received = received
        ctx.rows = tensor.shape[0]
        if splits is None:
            return output
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, *unused: Any) -> Any:
        gradient, _ = alltoall(grad_output, splits=ctx.received, process_set=ctx.process_set)
        if gradient.shape[0] < ctx.rows:
            # Rows that were sent to nobody.
            padding = gradient.new_zeros([ctx.rows - gradient.shape[0], *gradient.shape[1:]])
            gradient = torch.cat([gradient, padding])
        return gradient, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows; differentiable. Returns the rows, and with `splits` also how many came from each rank."""
    return HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
