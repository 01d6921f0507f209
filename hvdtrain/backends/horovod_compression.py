"""Gradient compression for Horovod: compressors in the form that its DistributedOptimizer takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Fp16:
    """Halves floating gradients wider than 16 bits. (Horovod's own compressor fails on sparse gradients.)"""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor to send, and what `decompress` needs; integers and sparse tensors travel as they are."""
        if tensor.is_sparse or not tensor.dtype.is_floating_point or tensor.dtype is torch.float16:
            return tensor, None
        return tensor.half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The reduced tensor in the dtype of the gradient."""
        return tensor if ctx is None else tensor.to(ctx)


class WidenBf16(Fp16):
    """Sends bfloat16 gradients as float32: Horovod 0.28.1 has no bfloat16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor to send, and what `decompress` needs."""
        if tensor.is_sparse or tensor.dtype is not torch.bfloat16:
            return tensor, None
        return tensor.float(), tensor.dtype


def compressor(compression: str, dtypes: Sequence[torch.dtype], hvd: Any) -> Any:
    """The compressor for gradients of the given dtypes. compression: none | fp16."""
    if compression == "fp16":
        return Fp16
    return WidenBf16 if torch.bfloat16 in dtypes else hvd.Compression.none
