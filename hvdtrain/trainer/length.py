"""How long a run is, and how far along it a resumed run stands."""

from __future__ import annotations

import dataclasses

from hvdtrain.config import Config
from hvdtrain.data.feed import Feed
from hvdtrain.trainer.position import Position


@dataclasses.dataclass
class RunLength:
    """At which step the run ends: by its limits, its ranks and its batch of now, from where it stands.

    Attributes:
        total_steps: the step after which the run is over, those of earlier sessions included; None: nobody knows.
        ahead_steps: how many steps more than it took a run of the present ranks and batch would have taken to be where
            this one is in its epochs (half of the epochs are half of them, whoever did them); what a schedule counts
            besides the steps. Negative after steps of fewer ranks; 0 where nothing changed, and where max_steps ends
            the run.
    """

    total_steps: int | None = None
    ahead_steps: int = 0

    def measure(self, config: Config, feed: Feed, position: Position) -> None:
        """Work it out, for a run that stands at `position`. Not collective; the same on every rank."""
        by_epochs, ahead = None, 0
        per_epoch = feed.steps_per_epoch
        if per_epoch is not None and config.epochs is not None:
            left = 0
            if position.epoch < config.epochs:
                in_epoch = feed.steps_left(position.samples_in_epoch) or 0
                left = in_epoch + per_epoch * (config.epochs - position.epoch - 1)
            by_epochs = position.step + left
            ahead = per_epoch * config.epochs - by_epochs
        limits = [limit for limit in (by_epochs, config.max_steps) if limit is not None]
        self.total_steps = min(limits) if limits else None
        self.ahead_steps = ahead if by_epochs == self.total_steps else 0
