"""Where a run is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Position:
    """What a checkpoint calls progress.

    Attributes:
        epoch: the epoch that the next step is of, from 0; also the number of complete epochs.
        step: optimizer steps done, skipped ones included.
        samples_in_epoch: samples of the epoch (items of the dataset, over all ranks) that are used.
    """

    epoch: int = 0
    step: int = 0
    samples_in_epoch: int = 0

    def to_dict(self) -> dict[str, int]:
        """For the checkpoint."""
        return dataclasses.asdict(self)
