"""A task whose phases take known times: sleeps, which no busy machine makes shorter."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset

import hvdtrain


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Layers(nn.Module):
    """Two layers; between their gradients backward() sleeps."""

    def __init__(self, backward_s: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.backward_s = backward_s

    def forward(self, x):
        return self.last(_SleepInBackward.apply(self.first(x), self.backward_s))


class SlowData(Dataset):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((64,), float(index))


class SlowOptimizer(torch.optim.SGD):
    def __init__(self, parameters, seconds: float) -> None:
        super().__init__(parameters, lr=1e-6)
        self.seconds = seconds

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class Slow:
    """Seconds per microbatch of one sample.

    Args:
        late_s: what the last rank's forward takes longer.
    """

    def __init__(self, data_s=0.0, forward_s=0.0, late_s=0.0, backward_s=0.0, optimizer_s=0.0) -> None:
        self.data_s, self.forward_s, self.late_s = data_s, forward_s, late_s
        self.backward_s, self.optimizer_s = backward_s, optimizer_s

    def model(self) -> nn.Module:
        return Layers(self.backward_s)

    def train_dataset(self) -> SlowData:
        return SlowData(self.data_s)

    def optimizer(self, parameters):
        return SlowOptimizer(parameters, self.optimizer_s)

    def loss(self, model, batch):
        world = hvdtrain.world()
        time.sleep(self.forward_s + (self.late_s if world.rank == world.size - 1 else 0.0))
        return model(batch).square().mean()
