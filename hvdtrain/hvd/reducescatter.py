"""Reducescatter, single and grouped: reduces, and leaves each rank a share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.hvd.basics import Average, Sum
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.compression import Compression, Compressor
from hvdtrain.hvd.engine.request import Kind
from hvdtrain.hvd.gather import allgather, grouped_allgather
from hvdtrain.hvd.handles import submit, synchronize


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce a tensor and to share its rows among the ranks; what is left over goes to the first ranks.

    Args:
        tensor: at least one dimension; shape and dtype equal on all ranks.
        name: matches the tensors of the ranks; see `allreduce_async`.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: multiply before and after the reduction.

    Returns:
        A handle for `poll` and `synchronize`.
    """
    return submit(
        Kind.REDUCESCATTER, name, process_set, [tensor], None, single=True,
        op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


def _scale(op: int, process_set: ProcessSet, prescale_factor: float, postscale_factor: float) -> float:
    return (process_set.size() or 1 if op == Sum else 1) * prescale_factor * postscale_factor


class HorovodReducescatter(torch.autograd.Function):
    """The gradient of a reducescatter is the allgather of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
    ) -> torch.Tensor:
        ctx.process_set = process_set
        ctx.factor = _scale(op, process_set, prescale_factor, postscale_factor)
        handle = reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor)
        result: torch.Tensor = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
        gradient = grad_output if ctx.factor == 1 else grad_output * ctx.factor
        return allgather(gradient, process_set=ctx.process_set), None, None, None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce and return this rank's share of the rows; differentiable. See `reducescatter_async`."""
    compressed, ctx = compression.compress(tensor)
    reduced = HorovodReducescatter.apply(compressed, name, op, process_set, prescale_factor, postscale_factor)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of a list of tensors together. See `reducescatter_async`."""
    return submit(
        Kind.REDUCESCATTER, name, process_set, tensors, None, single=False,
        op=op, prescale=float(prescale_factor), postscale=float(postscale_factor),
    )  # fmt: skip


class HorovodGroupedReducescatter(torch.autograd.Function):
    """As HorovodReducescatter, for a list of tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.process_set = process_set
        ctx.factor = _scale(op, process_set, prescale_factor, postscale_factor)
        handle = grouped_reducescatter_async(list(tensors), name, op, process_set, prescale_factor, postscale_factor)
        result: tuple[torch.Tensor, ...] = synchronize(handle)
        return result

    @staticmethod
    def backward(ctx: Any, *grad_output: torch.Tensor) -> Any:
        gradients = [g if ctx.factor == 1 else g * ctx.factor for g in grad_output]
        return (None, None, None, None, None, *grouped_allgather(gradients, process_set=ctx.process_set))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reducescatter of a list of tensors together; differentiable. See `reducescatter_async`."""
    compressed, contexts = zip(*[compression.compress(tensor) for tensor in tensors], strict=True)
    reduced = HorovodGroupedReducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, *compressed)  # type: ignore[no-untyped-call]
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts, strict=True)]
