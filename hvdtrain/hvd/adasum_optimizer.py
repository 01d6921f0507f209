"""DistributedOptimizer with op=Adasum: every rank steps on its own, and the steps are combined, not the gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hvdtrain.hvd.allreduce import allreduce_async_
from hvdtrain.hvd.basics import Adasum
from hvdtrain.hvd.compression import Compressor
from hvdtrain.hvd.handles import synchronize


class AdasumMixin:
    """Put in front of the class of the wrapped optimizer."""

    param_groups: list[dict[str, Any]]

    def _setup(
        self,
        named_parameters: Sequence[tuple[str, torch.Tensor]],
        compression: type[Compressor],
        backward_passes_per_step: int,
    ) -> None:
        self._parameter_names = {p: name for name, p in sorted(named_parameters, key=lambda pair: pair[0])}
        self._compression = compression
        self.backward_passes_per_step = backward_passes_per_step
        self.op = Adasum

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up before `step`."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Does nothing: what is reduced are the steps, and `step` does so."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the optimizer step on the local gradients, then replace every rank's step by their Adasum. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trainable = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        starts = [p.detach().clone() for p in trainable]
        for p in trainable:
            # A rank that did not compute a gradient still takes part.
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        super().step()  # type: ignore[misc]
        handles = []
        for p, start in zip(trainable, starts, strict=True):
            compressed, ctx = self._compression.compress(p.detach() - start)
            handles.append((allreduce_async_(compressed, name=f"adasum.{self._parameter_names[p]}", op=Adasum), ctx))
        for p, start, (handle, ctx) in zip(trainable, starts, handles, strict=True):
            p.copy_(start + self._compression.decompress(synchronize(handle), ctx))
        return loss
