"""What `hvdtrain bench hvd` measures: models with data, and bare reductions. The same for every contestant."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.bench.workloads import MLPS, Mlp

COMPRESSIONS = ("none", "fp16")
# Elements of float32 of the bare reductions: 4 bytes, 64 MB.
REDUCTIONS = {"latency": 1, "throughput": 16_000_000}
# So small that thousands of steps on one batch leave the gradients as large as they are at first: the cost of float16
# depends on their size.
LEARNING_RATE = 1e-6
_RESNET_BATCH = 16


class Residual(nn.Module):
    """Two convolutions around a shortcut, [N, inputs, H, W] -> [N, outputs, H / stride, W / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.shortcut(images) + self.body(images))


def small_resnet() -> nn.Module:
    """18 convolutions deep, 0.7 million parameters in 62 tensors, for images [N, 3, 32, 32]."""
    blocks: list[nn.Module] = []
    inputs = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        blocks += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks, *head)


@dataclasses.dataclass(frozen=True)
class Training:
    """A model and one batch of random numbers, equal on all ranks: only time is measured."""

    model: nn.Module
    inputs: torch.Tensor
    labels: torch.Tensor

    def stepper(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """One step of `model` (ours, or that wrapped) and `optimizer`."""

        def step() -> None:
            optimizer.zero_grad()
            loss: Any = functional.cross_entropy(model(self.inputs), self.labels)
            loss.backward()
            optimizer.step()

        return step


def make_training(name: str) -> Training:
    """name: of an MLP in `workloads.MLPS`, or "resnet"."""
    torch.manual_seed(1)
    if name == "resnet":
        model, inputs, batch_size = small_resnet(), torch.randn(_RESNET_BATCH, 3, 32, 32), _RESNET_BATCH
    else:
        widths, batch_size = MLPS[name]
        model, inputs = Mlp(widths).model(), torch.randn(batch_size, widths[0])
    return Training(model, inputs, torch.randint(10, (batch_size,)))


def arguments() -> argparse.Namespace:
    """The command line of the contestants' scripts: `work` and `compression`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=[*MLPS, "resnet", *REDUCTIONS])
    parser.add_argument("--compression", choices=COMPRESSIONS, default="none")
    return parser.parse_args()
