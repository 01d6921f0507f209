"""Microbatches grouped into steps, on this rank, in agreement with the other ranks.

Two sources, one interface. A map dataset's lengths are known, so every rank works out for itself who has how much in
each step. A stream's are not, so each rank reads one group ahead and the ranks vote, with a reduction that runs beside
the backward pass of the step before; end of data is voted, never guessed.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.data.order import StepPlan


@dataclasses.dataclass
class Group:
    """What this rank has for one step.

    Attributes:
        microbatches: (batch, number of samples); fewer than `accumulate` at the end, empty where the data has ended.
        num_samples: samples of the step over all ranks, where batches have a number of samples.
        last_of_epoch: no step of this epoch follows; of a voted source, known once the vote on the next group is in.
    """

    microbatches: list[tuple[Any, int]]
    num_samples: int
    last_of_epoch: bool


class GroupSource(abc.ABC):
    """The groups of one epoch, from a cursor on.

    Attributes:
        votes: whether a vote of the ranks is needed before each step (see `ballot` and `decide`).
        waited_s: time spent waiting for the loader.
    """

    votes: bool
    waited_s = 0.0

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Group]: ...

    def ballot(self) -> tuple[float, float]:
        """(1 if this rank has a next group, samples in it), to be summed over the ranks."""
        return 0.0, 0.0

    def decide(self, num_ranks_with_data: float, num_samples: float) -> None:
        """The outcome of the vote on the next group."""
        return

    def read_ahead(self) -> None:
        """Fetch what the ballot speaks of; before the vote starts."""
        return

    def peek(self) -> Any:
        """The first batch of what was read ahead; None if there is none."""
        return None

    def _timed(self, take: Callable[[], list[tuple[Any, int]]]) -> list[tuple[Any, int]]:
        start_s = time.perf_counter()
        taken = take()
        self.waited_s += time.perf_counter() - start_s
        return taken


class PlannedGroups(GroupSource):
    """Groups of a map dataset."""

    votes = False

    def __init__(self, loader: Iterator[tuple[Any, int]], plan: StepPlan, accumulate: int) -> None:
        self._loader, self._plan, self._accumulate = loader, plan, accumulate

    def __iter__(self) -> Iterator[Group]:
        num_steps = self._plan.num_steps
        for step in range(num_steps):
            microbatches = self._timed(lambda: list(itertools.islice(self._loader, self._accumulate)))
            yield Group(microbatches, self._plan.samples(step), step == num_steps - 1)


class VotedGroups(GroupSource):
    """Groups of a stream, or of anything whose length or weight is known only once it is read.

    Args:
        take: reads this rank's next microbatches; an empty list where the data has ended.
        stop: end with the first rank that has nothing left.
        vote: sums a ballot over the ranks at once; for the first group, when there is no step to hide it behind.
    """

    votes = True

    def __init__(
        self,
        take: Callable[[], list[tuple[Any, int]]],
        *,
        size: int,
        stop: bool,
        vote: Callable[[tuple[float, float]], tuple[float, float]],
    ) -> None:
        self._take, self._vote = take, vote
        self._needed = size if stop else 1
        self._current: Group | None = None
        self._next: list[tuple[Any, int]] | None = None
        self._outcome: tuple[float, float] | None = None

    def read_ahead(self) -> None:
        if self._next is None:
            self._next = self._timed(self._take)

    def peek(self) -> Any:
        return self._next[0][0] if self._next else None

    def ballot(self) -> tuple[float, float]:
        microbatches = self._next or []
        return float(bool(microbatches)), float(sum(count for _, count in microbatches))

    def decide(self, num_ranks_with_data: float, num_samples: float) -> None:
        self._outcome = (num_ranks_with_data, num_samples)
        if self._current is not None:
            self._current.last_of_epoch = num_ranks_with_data < self._needed

    def __iter__(self) -> Iterator[Group]:
        self.read_ahead()
        self.decide(*self._vote(self.ballot()))
        while True:
            assert self._next is not None, "a group was taken before it was read"
            assert self._outcome is not None, "a group was taken without a vote on it"
            num_ranks, num_samples = self._outcome
            if num_ranks < self._needed:
                return
            self._current = Group(self._next, int(num_samples), False)
            self._next = self._outcome = None
            yield self._current
