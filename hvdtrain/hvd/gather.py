"""Allgather, single and grouped: concatenates along the first dimension, in which the ranks may differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.hvd.basics import Average
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.engine.request import Kind
from hvdtrain.hvd.handles import submit, synchronize


def _rows(tensor: torch.Tensor) -> int:
    return int(tensor.shape[0]) if tensor.dim() else 0


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start to concatenate this tensor with those of the other ranks, in rank order.

    Args:
        tensor: at least one dimension; the first may differ between ranks, the others and the dtype may not.
        name: matches the tensors of the ranks; see `allreduce_async`.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    return submit(Kind.ALLGATHER, name, process_set, [tensor], None, single=True, varying=[_rows(tensor)])


class HorovodAllgather(torch.autograd.Function):
    """The gradient of an allgather is this rank's rows of the averaged gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        ctx.rows = _rows(tensor)
        ctx.process_set = process_set
        result: torch.Tensor = synchronize(allgather_async(tensor, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        (gradient,) = _own_rows([grad_output], [ctx.rows], ctx.process_set)
        return gradient, None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension; differentiable. See `allgather_async`."""
    return HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call,no-any-return]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather a list of tensors together. See `allgather_async`."""
    rows = [_rows(tensor) for tensor in tensors]
    return submit(Kind.ALLGATHER, name, process_set, tensors, None, single=False, varying=rows)


class HorovodGroupedAllgather(torch.autograd.Function):
    """As HorovodAllgather, for a list of tensors."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.rows = [_rows(tensor) for tensor in tensors]
        ctx.process_set = process_set
        result: tuple[torch.Tensor, ...] = synchronize(grouped_allgather_async(list(tensors), name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        return (None, None, *_own_rows(list(grad_output), ctx.rows, ctx.process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Gather a list of tensors together; differentiable. See `allgather_async`."""
    return HorovodGroupedAllgather.apply(name, process_set, *tensors)  # type: ignore[no-untyped-call,no-any-return]


def _own_rows(gradients: list[torch.Tensor], rows: list[int], process_set: ProcessSet) -> list[torch.Tensor]:
    """Average gathered gradients over the ranks and cut out what belongs to this rank's rows."""
    from hvdtrain.hvd.allreduce import grouped_allreduce

    counts = torch.tensor([rows], dtype=torch.int64)
    everybody: torch.Tensor = synchronize(allgather_async(counts, process_set=process_set))
    offsets = everybody[: process_set.rank() or 0].sum(0).tolist()
    averaged = grouped_allreduce(gradients, op=Average, process_set=process_set)
    return [g.narrow(0, offset, count) for g, offset, count in zip(averaged, offsets, rows, strict=True)]
