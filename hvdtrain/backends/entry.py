"""The module that DistributedDataParallel wraps: the user's model, with a way through that needs no batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn


class Entry(nn.Module):
    """Calls the model; inside `without_model()` gives 0, made from no element of every trained parameter, instead.

    That 0 reaches every parameter, so backward() through DDP joins every reduction with zero gradients, and neither
    buffers nor hooks of the model are touched. Attributes that it lacks are looked up in the model, so that
    `model.module.encoder` works as with plain DDP.
    """

    def __init__(self, model: nn.Module, sparse: list[nn.Parameter]) -> None:
        super().__init__()
        self.model = model
        # In a list: nn.Module looks closely at every value that is set as an attribute, which takes microseconds.
        self._was_called = [False]
        self._sparse = {id(p) for p in sparse}
        self._skip = False

    def expect_call(self) -> None:
        """From now on `was_called` tells whether a forward pass came through."""
        self._was_called[0] = False

    @property
    def was_called(self) -> bool:
        return self._was_called[0]

    @contextlib.contextmanager
    def without_model(self) -> Iterator[None]:
        """Let forward() skip the model."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._was_called[0] = True
        if not self._skip:
            return self.model(*args, **kwargs)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.stack([self._nothing_of(p) for p in trained]).sum()

    def _nothing_of(self, parameter: nn.Parameter) -> torch.Tensor:
        # The sum of no elements, not 0 * an element: that would be NaN for a parameter that is infinite.
        if id(parameter) not in self._sparse:
            return parameter.reshape(-1)[:0].sum()
        no_rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return nn.functional.embedding(no_rows, parameter, sparse=True).sum()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def sparse_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters whose gradients are sparse, as far as their modules tell."""
    weights: dict[nn.Parameter, None] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            weights[cast(nn.Parameter, module.weight)] = None
    return list(weights)
