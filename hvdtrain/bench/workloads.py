"""The models and the data of the benchmarks: random numbers in memory, so that only the loop is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

Batch = tuple[torch.Tensor, torch.Tensor]


class InMemory(Dataset[Any]):
    """Vectors float32 [N, num_features] with labels int64 [N], handed out as whole microbatches."""

    def __init__(self, num_samples: int, num_features: int, num_classes: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(num_samples, num_features, generator=generator)
        self.labels = torch.randint(num_classes, (num_samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.vectors[index], self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        return self.vectors[chosen], self.labels[chosen]


def as_is(batch: Batch) -> Batch:
    """The collate function for a dataset that hands out microbatches."""
    return batch


class Mlp:
    """A task: classify random vectors with a multi-layer perceptron.

    Args:
        widths: sizes of input, hidden layers and output.
        num_samples: size of the data set.
    """

    def __init__(self, widths: Sequence[int], num_samples: int = 8192) -> None:
        self.widths, self.num_samples = list(widths), num_samples

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def train_dataset(self) -> Dataset[Any]:
        return InMemory(self.num_samples, self.widths[0], self.widths[-1])

    def collate(self, samples: Batch) -> Batch:
        return as_is(samples)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])


# name: (widths, samples of one rank's microbatch)
MLPS: dict[str, tuple[list[int], int]] = {
    "small": ([784, 128, 128, 10], 32),
    "large": ([784, 2048, 2048, 2048, 10], 16),
}
