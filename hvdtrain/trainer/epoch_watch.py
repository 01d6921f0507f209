"""What a script that drives the trainer may be told while it trains."""

from __future__ import annotations

from typing import Protocol


class EpochWatch(Protocol):
    """Called on every rank; not collective, and must not be: a call that waits for other ranks would stall the job."""

    def epoch_started(self, epoch: int) -> None:
        """An epoch begins, or goes on after a resume. Epochs count from 0."""

    def epoch_ended(self, epoch: int, num_steps: int, seconds: float) -> None:
        """An epoch is complete; its evaluation comes after this call.

        Args:
            num_steps: optimizer steps that this session took in it.
            seconds: that they took on this rank, evaluation and checkpoints not counted.
        """
