"""Allreduce in all its forms: single, grouped and sparse; in place, asynchronous and differentiable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.hvd.basics import Average, average_or_op
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.compression import Compression, Compressor
from hvdtrain.hvd.engine.request import Kind
from hvdtrain.hvd.gather import allgather_async
from hvdtrain.hvd.handles import check_adasum, submit, synchronize


def _allreduce(
    tensors: Sequence[torch.Tensor],
    outputs: list[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    single: bool,
) -> int:
    check_adasum(op, process_set)
    return submit(
        Kind.ALLREDUCE, name, process_set, tensors, outputs, single=single,
        op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor over the ranks; the tensor itself is not changed.

    Tensors are matched by name, in whatever order the ranks submit them; without a name the n-th unnamed allreduce of
    one rank meets the n-th of the others.

    Args:
        tensor: any shape and dtype, equal on all ranks.
        average: the predecessor of `op`: True for Average, False for Sum.
        name: of the operation.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor, postscale_factor: multiply before and after the reduction.
        process_set: the ranks that take part.

    Returns:
        A handle for `poll` and `synchronize`.

    Raises:
        ValueError: both `average` and `op` are given, or the name is in flight.
    """
    op = average_or_op(op, average)
    output = torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
    return _allreduce([tensor], [output], name, op, prescale_factor, postscale_factor, process_set, True)


class HorovodAllreduce(torch.autograd.Function):
    """The gradient of an allreduce is the same allreduce of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.arguments = (average, op, prescale_factor, postscale_factor, process_set)
        handle = allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        average, op, prescale_factor, postscale_factor, process_set = ctx.arguments
        gradient = allreduce(
            grad_output, average=average, op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor,
            process_set=process_set,
        )  # fmt: skip
        return gradient, None, None, None, None, None, None


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor over the ranks and return the result; differentiable. See `allreduce_async`."""
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodAllreduce.apply(compressed, average, name, op, prescale_factor, postscale_factor, process_set)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a tensor in place. See `allreduce_async`."""
    op = average_or_op(op, average)
    return _allreduce([tensor], [tensor.detach()], name, op, prescale_factor, postscale_factor, process_set, True)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce a tensor in place and return it. See `allreduce_async`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(handle)
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a list of tensors together: none before all are there. See `allreduce_async`."""
    op = average_or_op(op, average)
    outputs = [torch.empty_like(t, requires_grad=False, memory_format=torch.contiguous_format) for t in tensors]
    return _allreduce(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, False)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """As HorovodAllreduce, for a list of tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (average, op, prescale_factor, postscale_factor, process_set)
        handle = grouped_allreduce_async(
            list(tensors), average, name, op, prescale_factor, postscale_factor, process_set
        )
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        average, op, prescale_factor, postscale_factor, process_set = ctx.arguments
        gradients = grouped_allreduce(
            list(grad_output), average=average, op=op, prescale_factor=prescale_factor,
            postscale_factor=postscale_factor, process_set=process_set,
        )  # fmt: skip
        return (None, None, None, None, None, None, *gradients)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce a list of tensors together and return the results; differentiable. See `allreduce_async`."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = HorovodGroupedAllreduce.apply(  # type: ignore[no-untyped-call]
        average, name, op, prescale_factor, postscale_factor, process_set, *compressed
    )
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to reduce a list of tensors together and in place. See `allreduce_async`."""
    op = average_or_op(op, average)
    outputs = [tensor.detach() for tensor in tensors]
    return _allreduce(tensors, outputs, name, op, prescale_factor, postscale_factor, process_set, False)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[torch.Tensor]:
    """Reduce a list of tensors together and in place, and return them. See `allreduce_async`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    synchronize(handle)
    return tensors


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse COO tensor: indices and values are gathered, equal indices add up.

    Returns:
        A function that waits and returns the sparse result (not coalesced).
    """
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    def finish() -> torch.Tensor:
        all_values: torch.Tensor = synchronize(values_handle)
        all_indices: torch.Tensor = synchronize(indices_handle)
        if op == Average:
            all_values = all_values / (process_set.size() or 1)
        return torch.sparse_coo_tensor(
            all_indices.transpose(0, 1), all_values, tensor.size(), dtype=tensor.dtype, device=tensor.device,
            check_invariants=False,
        )  # fmt: skip

    return finish
