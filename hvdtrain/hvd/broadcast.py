"""Broadcast: one rank's tensor for all."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.hvd.basics import Average, rank
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.engine.request import Kind
from hvdtrain.hvd.handles import submit, synchronize


def _broadcast(
    tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    return submit(Kind.BROADCAST, name, process_set, [tensor], [output], single=True, root=int(root_rank))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to send the root's tensor to all ranks; the tensors themselves are not changed.

    Args:
        tensor: shape and dtype equal on all ranks.
        root_rank: whose values all ranks get (a global rank, also with a process set).
        name: matches the tensors of the ranks; see `allreduce_async`.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    output = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
    return _broadcast(tensor, output, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """The gradient of a broadcast is the averaged gradient on the root, and zero elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        result: torch.Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        from hvdtrain.hvd.allreduce import allreduce

        gradient = allreduce(grad_output, op=Average, process_set=ctx.process_set)
        if rank() != ctx.root_rank:
            gradient = torch.zeros_like(gradient)
        return gradient, None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the root's tensor on all ranks; differentiable. See `broadcast_async`."""
    return HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call,no-any-return]


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to overwrite the tensor with the root's. See `broadcast_async`."""
    return _broadcast(tensor, tensor.detach(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite the tensor with the root's and return it. See `broadcast_async`."""
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor
