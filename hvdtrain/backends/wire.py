"""How a tensor travels: what is reduced in place of dtypes that one backend or the other cannot carry.

Horovod 0.28.1 refuses bool, bfloat16 and uint8 reductions, gloo refuses int16; both would otherwise differ from each
other. So every backend carries the same few dtypes and the result is turned back into what the caller expects.
"""

from __future__ import annotations

import torch

# dtype of the caller -> dtype that every backend reduces. Small integers widen and wrap on the way back, as a sum in
# their own dtype would. 16-bit floats widen, so that the result is rounded once and does not depend on the order.
_CARRIED = {
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}

OPS = ("sum", "mean", "min", "max", "product")
DTYPES = tuple(_CARRIED)


def result_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of a reduction's result.

    As torch's own reductions: the sum and product of bools is int64, the mean of integers and bools is the default
    floating dtype; everything else keeps its dtype.
    """
    integral = not dtype.is_floating_point
    if op == "mean" and integral:
        return torch.get_default_dtype()
    if dtype is torch.bool and op in ("sum", "product"):
        return torch.int64
    return dtype


def carried_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype that travels for a caller's dtype; KeyError for one that cannot be reduced (complex, quantized)."""
    if op == "mean" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.float64  # exact to 2**53, where an integer sum might have wrapped around
    return torch.int64 if dtype is torch.bool and op in ("sum", "product") else _CARRIED[dtype]


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a 1-d uint8 tensor (a copy where it was not contiguous)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
