"""Compressors for Horovod: what is halved, what is widened, what travels as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.backends.horovod_compression import Fp16, WidenBf16, compressor

HVD = SimpleNamespace(Compression=SimpleNamespace(none="Horovod's own none"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_wide_floats_are_halved_and_come_back(dtype: torch.dtype) -> None:
    sent, context = Fp16.compress(torch.tensor([1.5, 1e-9], dtype=dtype))
    assert sent.dtype is torch.float16
    assert Fp16.decompress(sent, context).dtype is dtype
    assert Fp16.decompress(sent, context).tolist() == [1.5, 0.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([70000]),
        torch.tensor([True]),
        torch.tensor([1.5], dtype=torch.float16),
        torch.tensor([70000.0]).to_sparse(),
    ],
)
@pytest.mark.parametrize("kind", [Fp16, WidenBf16])
def test_integers_sparse_and_half_tensors_travel_as_they_are(kind: type[Fp16], tensor: torch.Tensor) -> None:
    sent, context = kind.compress(tensor)
    assert sent is tensor
    assert kind.decompress(sent, context) is tensor


def test_bf16_is_widened_and_comes_back() -> None:
    sent, context = WidenBf16.compress(torch.tensor([1.5], dtype=torch.bfloat16))
    assert sent.dtype is torch.float32
    assert WidenBf16.decompress(sent, context).dtype is torch.bfloat16
    wide = torch.tensor([1.5])
    assert WidenBf16.compress(wide)[0] is wide


def test_horovod_s_own_where_nothing_has_to_change() -> None:
    assert compressor("none", [torch.float32, torch.float16], HVD) == "Horovod's own none"
    assert compressor("none", [torch.float32, torch.bfloat16], HVD) is WidenBf16
    assert compressor("fp16", [torch.bfloat16], HVD) is Fp16
