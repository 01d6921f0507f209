"""The place of a process among the others."""

from __future__ import annotations

import dataclasses

from hvdtrain.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class World:
    """Where this process stands. Horovod calls the last two cross_rank and cross_size.

    Raises:
        LaunchError: a value is out of range (a rank that is not below its size, a size below one).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for place, total in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "num_nodes")):
            value, limit = getattr(self, place), getattr(self, total)
            if limit < 1 or not 0 <= value < limit:
                raise LaunchError(f"{place}={value} with {total}={limit}: {place} must be from 0 to {total}-1")

    @property
    def is_root(self) -> bool:
        """Whether this rank owns the shared state (rank 0)."""
        return self.rank == 0
