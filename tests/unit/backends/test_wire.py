"""What travels in place of each dtype, and what a reduction gives back."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.backends import wire

# What Horovod 0.28.1 and gloo both reduce.
BOTH_REDUCE = {torch.int32, torch.int64, torch.float32, torch.float64}


@pytest.mark.parametrize("op", wire.OPS)
@pytest.mark.parametrize("dtype", wire.DTYPES)
def test_only_dtypes_that_both_backends_reduce_travel(dtype: torch.dtype, op: str) -> None:
    assert wire.carried_dtype(dtype, op) in BOTH_REDUCE


@pytest.mark.parametrize(
    ("dtype", "op", "expected"),
    [
        (torch.bool, "sum", torch.int64),
        (torch.bool, "product", torch.int64),
        (torch.bool, "min", torch.bool),
        (torch.bool, "max", torch.bool),
        (torch.bool, "mean", torch.float32),
        (torch.uint8, "sum", torch.uint8),
        (torch.int64, "mean", torch.float32),
        (torch.float16, "mean", torch.float16),
        (torch.bfloat16, "sum", torch.bfloat16),
        (torch.float64, "mean", torch.float64),
    ],
)
def test_dtype_of_the_result(dtype: torch.dtype, op: str, expected: torch.dtype) -> None:
    assert wire.result_dtype(dtype, op) is expected


def test_means_of_integers_travel_as_floats_that_cannot_wrap() -> None:
    assert wire.carried_dtype(torch.int32, "mean") is torch.float64
    assert wire.carried_dtype(torch.bool, "mean") is torch.float64


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn])
def test_other_dtypes_are_unknown(dtype: torch.dtype) -> None:
    assert dtype not in wire.DTYPES
    for op in wire.OPS:
        with pytest.raises(KeyError):
            wire.carried_dtype(dtype, op)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, -2], dtype=torch.int16),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(2, requires_grad=True),
        torch.tensor([1.5], dtype=torch.bfloat16),
    ],
)
def test_bytes_and_back(tensor: torch.Tensor) -> None:
    data = wire.to_bytes(tensor)
    assert data.dtype is torch.uint8
    assert data.shape == (tensor.numel() * tensor.element_size(),)
    assert not data.requires_grad
    assert torch.equal(data.view(tensor.dtype).reshape(tensor.shape), tensor)
