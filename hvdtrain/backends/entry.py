"""The module that DistributedDataParallel wraps: the user's model, with a way through that needs no batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class Entry(nn.Module):
    """Calls the model; inside `without_model()` gives 0 * (sum of one element of every trained parameter) instead.

    That sum reaches every parameter, so backward() through DDP joins every reduction with zero gradients, and neither
    buffers nor hooks of the model are touched. Attributes that it lacks are looked up in the model, so that
    `model.module.encoder` works as with plain DDP.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._skip = False

    @contextlib.contextmanager
    def without_model(self) -> Iterator[None]:
        """Let forward() skip the model."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._skip:
            return self.model(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.stack([p.reshape(-1)[:1].sum() * 0 for p in trained]).sum()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)
