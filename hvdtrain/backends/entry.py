"""The module that DistributedDataParallel wraps: the user's model, with a way through that needs no batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from hvdtrain.backends.nothing import loss_of_nothing


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
        return loss_of_nothing(trained, self._sparse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)
