"""A subset of the ranks, under any backend."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that do collectives among themselves: a process group (ddp) or a process set (horovod).

    Attributes:
        ranks: the global ranks in the group, ascending.
        native: the backend's own handle; None on ranks outside the group.
    """

    ranks: tuple[int, ...]
    native: Any

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)
