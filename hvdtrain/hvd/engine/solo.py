"""A group of one rank: every collective is done before it begins."""

from __future__ import annotations

from typing import Any

import torch


class DoneWork:
    """Looks like a finished torch.distributed.Work."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class SoloGroup:
    """Looks, as far as the executor is concerned, like a torch.distributed.ProcessGroup with one member."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> DoneWork:
        return DoneWork()

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> DoneWork:
        return DoneWork()

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor) -> DoneWork:
        output.copy_(source)
        return DoneWork()

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int]
    ) -> DoneWork:
        output.copy_(source)
        return DoneWork()
