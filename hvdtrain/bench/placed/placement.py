"""What a place for ranks can do."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Spread:
    """How many hosts, and how many ranks on each, in the order of the hosts."""

    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.ranks)

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.ranks)

    def __str__(self) -> str:
        each = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "+".join(map(str, self.ranks))
        hosts = "host" if self.num_hosts == 1 else "hosts"
        return f"{self.num_hosts} {hosts} x {each}"


class Place(abc.ABC):
    """Hosts that ranks can be started on.

    Attributes:
        full: all hosts with all their ranks.
        sharing: None where the hosts are real; else what they share, in words.
    """

    full: Spread
    sharing: str | None = None

    @abc.abstractmethod
    def run(
        self, target: str, arguments: dict[str, Any], *, spread: Spread, limit_s: float, apart: bool = False
    ) -> list[Any]:
        """Run `function(flags, **arguments)` on every rank of the spread.

        Args:
            target: "module:function"; the flags that it gets say how to connect (None: the launcher's variables do).
            arguments: JSON values.
            limit_s: after so many seconds the ranks are ended.
            apart: every rank is a world of its own; they run at the same time and do not meet.

        Returns:
            What the function returned on each rank (JSON values), in the order of the ranks.

        Raises:
            TrainingFailed: a rank ended with a status that is not 0, or the limit passed.
        """

    def hosts_first(self, num_ranks: int) -> Spread:
        """`num_ranks` on as few hosts as possible, in their order."""
        ranks: list[int] = []
        for slots in self.full.ranks:
            if sum(ranks) < num_ranks:
                ranks.append(min(slots, num_ranks - sum(ranks)))
        return Spread(tuple(ranks))
