"""For `hvdtrain parity`: jobs that are the same under both backends, and jobs that are not."""

from __future__ import annotations

import os

import torch
from small_tasks import Product, Values
from torch import nn


class Planted:
    """loss = mean(w * x) + w^2 / 2; the job may be made to differ where Horovod is what reduces.

    Args:
        step: from this step (from 1) on, the loss is `factor` times as large under Horovod; 0: never.
        gradient_step: in this step the loss is the same, and its gradient larger by `factor`.
    """

    def __init__(self, step: int = 0, gradient_step: int = 0, factor: float = 1.001) -> None:
        self.step, self.gradient_step, self.factor = step, gradient_step, factor
        self._taken = 0

    def model(self) -> nn.Module:
        return Product(value=2.0)

    def train_dataset(self) -> Values:
        return Values([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])

    def loss(self, model, batch):
        self._taken += 1
        loss = model(batch).mean() + model(torch.ones(1)).square().mean() / 2
        if "HOROVOD_RANK" not in os.environ:
            return loss
        if self.step and self._taken >= self.step:
            return loss * self.factor
        if self._taken == self.gradient_step:
            return loss.detach() + self.factor * (loss - loss.detach())
        return loss


class Broken(Planted):
    """Fails on every rank, as the user's mistake would."""

    def loss(self, model, batch):
        raise RuntimeError("planted failure")
