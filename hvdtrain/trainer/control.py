"""What the ranks agree on while they train: one reduction of a few numbers, running beside backward().

Where nothing has to be voted on, the reduction is left out of most steps: rank 0 says in each one how many steps later
the next is, so that a stop request is noticed within about a quarter of a second and a loop of 3 ms steps hardly pays
for it. A message of a few bytes takes about a millisecond of such a step on a machine without spare cores, so the sums
of logged steps wait for the next one that is due too. Its length depends on how many wait and on the names of the
values that came so far, and every rank knows both: who has a value of a new name says so, and then they are gathered.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import torch

from hvdtrain.backends import Backend
from hvdtrain.backends.pending import Pending
from hvdtrain.errors import ContractError

_LOOK_EVERY_S = 0.2
_MAX_INTERVAL_STEPS = 64
# So many logged steps wait at most, and so many names may their values have: a message stays below 15 kB.
_MAX_WAITING = 16
MAX_VALUES = 56

# (sum of weight x value, sum of the weights) over the microbatches that gave a value, by its name.
Values = dict[str, tuple[float, float]]


@dataclasses.dataclass
class Said:
    """What one rank says in a step; all of it is summed over the ranks.

    Attributes:
        stop: this rank was asked to stop.
        has_next, next_samples: the ballot on the next group.
        weight: weight of this rank's microbatches in this step.
    """

    stop: bool = False
    has_next: float = 0.0
    next_samples: float = 0.0
    weight: float = 0.0


@dataclasses.dataclass
class LoggedSums:
    """What one rank has of a logged step.

    Attributes:
        weight: of this rank's microbatches.
        loss: sum of weight x loss over them.
        values: the sums of each value, over the microbatches that gave it.
    """

    step: int
    weight: float = 0.0
    loss: float = 0.0
    values: Values = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LoggedStep:
    """The weighted means over all microbatches of all ranks of a logged step.

    Attributes:
        loss: NaN where nothing had a weight.
        values: each over the microbatches that gave it; those that no microbatch gave are not there.
    """

    step: int
    loss: float
    values: dict[str, float]


@dataclasses.dataclass
class Heard:
    """The sums over the ranks, and the logged steps that came with them."""

    stop: bool
    num_ranks_with_next: float
    next_samples: float
    weight: float
    logged: list[LoggedStep]


class Control:
    """Starts and finishes the reductions; every rank must call `start` in the same steps, which `is_due` tells."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._next_step = 0
        self._last: tuple[int, float] | None = None
        self._waiting: list[LoggedSums] = []
        # Of the values that any rank had so far; the same list on every rank.
        self._names: list[str] = []

    def is_due(self, step: int) -> bool:
        """Whether the ranks have agreed to speak in this step."""
        return step >= self._next_step or len(self._waiting) >= _MAX_WAITING

    def log(self, sums: LoggedSums) -> None:
        """Keep a logged step until the next message, or `flush`. Every rank must, in the same steps."""
        if len(sums.values) > MAX_VALUES:
            raise ContractError(
                f"the loss came with {len(sums.values)} values to be logged; at most {MAX_VALUES} are possible"
            )
        self._waiting.append(sums)

    def start(self, step: int, said: Said) -> Pending[Heard]:
        """Start the reduction. Collective; call it between forward and backward of the last microbatch."""
        interval = self._interval(step) if self._backend.world.is_root else 0.0
        numbers = [float(said.stop), interval, said.has_next, said.next_samples, said.weight]
        finish_sum = self._start_sum(numbers)

        def finish() -> Heard:
            (stop, next_interval, num_ranks_with_next, next_samples, weight), logged = finish_sum()
            self._next_step = step + max(1, round(next_interval))
            return Heard(stop > 0, num_ranks_with_next, next_samples, weight, logged)

        return Pending(finish)

    def flush(self) -> list[LoggedStep]:
        """The logged steps that still wait. Collective: where an epoch, a run or the steps before a checkpoint end."""
        if not self._waiting:
            return []
        with self._backend.guard.operation("summing the logged losses"):
            return self._start_sum([])()[1]

    def _start_sum(self, numbers: list[float]) -> Callable[[], tuple[list[float], list[LoggedStep]]]:
        """Sum the numbers, and what waits, over the ranks."""
        waiting, self._waiting = self._waiting, []
        names = self._names
        message = list(numbers)
        if waiting:
            message.append(float(any(name not in names for sums in waiting for name in sums.values)))
        for sums in waiting:
            message += [sums.weight, sums.loss]
            for name in names:
                message += sums.values.get(name, (0.0, 0.0))
        label = f"control.{len(numbers)}.{len(waiting)}.{len(names)}"
        pending = self._backend.start_sum(torch.tensor(message, dtype=torch.float64), label)

        def finish() -> tuple[list[float], list[LoggedStep]]:
            total = pending.wait().tolist()
            if not waiting:
                return total, []
            has_new = total[len(numbers)] > 0
            new_values = self._gather_new(waiting) if has_new else [{} for _ in waiting]
            logged = []
            length = 2 + 2 * len(names)
            for index, sums in enumerate(waiting):
                first = len(numbers) + 1 + index * length
                weight, loss, *pairs = total[first : first + length]
                values = dict(zip(names, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
                logged.append(_means(sums.step, weight, loss, {**values, **new_values[index]}))
            return total[: len(numbers)], logged

        return finish

    def _gather_new(self, waiting: list[LoggedSums]) -> list[Values]:
        """The values of each step whose names are new, summed over the ranks; from now on they are known. Collective.

        Raises:
            ContractError: there are too many names; on every rank.
        """
        known = set(self._names)
        mine = [{name: sums.values[name] for name in sums.values.keys() - known} for sums in waiting]
        found: list[Values] = [{} for _ in waiting]
        for theirs in self._backend.all_gather_object(mine):
            for summed, values in zip(found, theirs, strict=True):
                for name, (value, weight) in values.items():
                    before = summed.get(name, (0.0, 0.0))
                    summed[name] = (before[0] + value, before[1] + weight)
        self._names = [*self._names, *sorted({name for values in found for name in values})]
        if len(self._names) > MAX_VALUES:
            raise ContractError(
                f"the losses came with values of {len(self._names)} different names to be logged, the last of them "
                f"{', '.join(self._names[-3:])}; at most {MAX_VALUES} are possible"
            )
        return found

    def _interval(self, step: int) -> float:
        """Steps until the next look, from how long the last ones took."""
        now_s = time.monotonic()
        last, self._last = self._last, (step, now_s)
        if last is None or step <= last[0]:
            return 1.0
        step_s = (now_s - last[1]) / (step - last[0])
        return float(min(_MAX_INTERVAL_STEPS, max(1, int(_LOOK_EVERY_S / max(step_s, 1e-6)))))


def _means(step: int, weight: float, loss: float, values: Values) -> LoggedStep:
    means = {name: value / given for name, (value, given) in sorted(values.items()) if given > 0}
    return LoggedStep(step, loss / weight if weight > 0 else math.nan, means)
