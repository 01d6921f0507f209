"""Arithmetic of the reductions, in one place: what a result is, whoever computes it.

Integers are scaled in float64 and truncated, averages of integers are divided exactly and truncated, half precision is
summed as float32 where this process does the sum. Numbers of the operations are Horovod's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.hvd.engine.adasum import adasum_tree
from hvdtrain.hvd.engine.request import ADASUM, AVERAGE, MAX, MIN, PRODUCT, SUM

_COMBINE: dict[int, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    SUM: torch.add,
    AVERAGE: torch.add,
    MIN: torch.minimum,
    MAX: torch.maximum,
    PRODUCT: torch.mul,
}


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers in float64, truncated."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))


def finish_(tensor: torch.Tensor, op: int, postscale: float, num_ranks: int) -> None:
    """Turn the sum over ranks into the result: divide for an average, then scale."""
    if op != AVERAGE:
        scale_(tensor, postscale)
    elif postscale == 1.0:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.div_(num_ranks)
        elif tensor.dtype != torch.bool:
            tensor.copy_(torch.div(tensor, num_ranks, rounding_mode="trunc"))
    else:
        scale_(tensor, postscale / num_ranks)


def reduce_list(
    tensors: list[torch.Tensor], op: int, prescale: float, postscale: float, num_ranks: int
) -> torch.Tensor:
    """Reduce contributions in rank order. The inputs may be overwritten.

    Args:
        tensors: equal shapes and dtypes; those of joined ranks (zeros) may be missing for sums.
        num_ranks: what an average divides by.

    Returns:
        A tensor of the same shape and dtype.
    """
    dtype = tensors[0].dtype
    for tensor in tensors:
        scale_(tensor, prescale)
    if op == ADASUM:
        result = adasum_tree(tensors)
        scale_(result, postscale)
        return result
    if dtype in (torch.float16, torch.bfloat16):
        tensors = [tensor.float() for tensor in tensors]
    result = functools.reduce(_COMBINE[op], tensors).to(dtype)
    finish_(result, op, postscale, num_ranks)
    return result


def combine_inline(kind: str, strict: list[Any], payloads: list[bytes], num_ranks: int) -> bytes:
    """Result bytes of an operation whose contributions came with the announcements (see `Coordinator`)."""
    if kind == "broadcast":
        return payloads[0]
    if kind == "allgather":
        # Each payload holds one rank's tensors one after the other, and only single tensors are sent this way.
        return b"".join(payloads)
    op, prescale, postscale = strict[3:6]
    dtype = getattr(torch, strict[0][0])
    if not payloads[0]:
        return b""
    tensors = [torch.frombuffer(bytearray(payload), dtype=dtype) for payload in payloads]
    return tensor_bytes(reduce_list(tensors, op, prescale, postscale, num_ranks))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a host tensor, contiguous order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A new host tensor that owns a copy of the bytes."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
