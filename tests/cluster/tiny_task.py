"""The smallest job that is still a job: for tests in which 16 ranks share two cores.

`delay_s` makes a step last, so that a test can interfere; each rank writes `ready` once it is in the loop.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Tiny:
    def __init__(self, samples: int = 192, delay_s: float = 0.0) -> None:
        self.samples, self.delay_s = samples, delay_s
        self.said = False

    def model(self) -> nn.Module:
        return nn.Linear(8, 1)

    def train_dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(7)
        inputs = torch.randn(self.samples, 8, generator=generator)
        return TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def eval_dataset(self) -> TensorDataset:
        return self.train_dataset()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        if self.delay_s:
            if not self.said:
                self.said = True
                print("ready", flush=True)
            time.sleep(self.delay_s)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[float, float]]:
        error = nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum")
        return {"error": (float(error), len(batch[0]))}
