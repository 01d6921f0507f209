"""When the gradients of a step were being reduced, as far as this rank can tell: for profiling."""

from __future__ import annotations

import abc
import dataclasses


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The reduction of the gradients of one backward pass. Times: nanoseconds since the epoch (time.time_ns).

    Attributes:
        started_ns: the first gradients went off.
        computed_ns: this rank's last gradient was there: from here on nothing was left to compute meanwhile.
        finished_ns: the last reduced gradient was there.
    """

    started_ns: int
    computed_ns: int
    finished_ns: int


class ReductionWatch(abc.ABC):
    """Notes the reductions of one replica from when it is made; `Replica.watch_reductions` makes it."""

    @abc.abstractmethod
    def take(self) -> list[Reduction]:
        """The reductions since the last call. Call it after each microbatch and after `finish_gradients`."""
