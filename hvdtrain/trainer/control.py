"""What the ranks agree on while they train: one reduction of a few numbers, running beside backward().

Where nothing has to be voted on, the reduction is left out of most steps: rank 0 says in each one how many steps later
the next is, so that a stop request is noticed within about a quarter of a second and a loop of 3 ms steps hardly pays
for it. A message of a few bytes takes about a millisecond of such a step on a machine without spare cores, so the sums
of logged steps wait for the next one that is due too. Its length depends only on how many wait, which every rank knows.
"""

from __future__ import annotations

import dataclasses
import math
import time
import zlib
from collections.abc import Callable

import torch

from hvdtrain.backends import Backend
from hvdtrain.backends.base import Pending
from hvdtrain.errors import CollectiveError, ContractError

_LOOK_EVERY_S = 0.2
_MAX_INTERVAL_STEPS = 64
# So many logged steps wait at most: a message stays below 8 kB.
_MAX_WAITING = 16


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
        values: sums of weight x value by name.
    """

    step: int
    weight: float = 0.0
    loss: float = 0.0
    values: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LoggedStep:
    """The weighted means over all microbatches of all ranks of a logged step; NaN where nothing had a weight."""

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
        names: list[list[str]] = []
        message = list(numbers)
        for sums in waiting:
            # A rank without data has no values, but root has to know what the others' sums are called.
            self._names = sorted(sums.values) or self._names
            names.append(self._names)
            message += _packed(sums, self._names)
        name = f"control.{len(numbers)}.{len(waiting)}"
        pending = self._backend.start_sum(torch.tensor(message, dtype=torch.float64), name)

        def finish() -> tuple[list[float], list[LoggedStep]]:
            total = pending.wait().tolist()
            logged = []
            for index, sums in enumerate(waiting):
                first = len(numbers) + index * _LOGGED_LENGTH
                logged.append(_unpacked(sums, total[first : first + _LOGGED_LENGTH], names[index]))
            return total[: len(numbers)], logged

        return finish

    def _interval(self, step: int) -> float:
        """Steps until the next look, from how long the last ones took."""
        now_s = time.monotonic()
        last, self._last = self._last, (step, now_s)
        if last is None or step <= last[0]:
            return 1.0
        step_s = (now_s - last[1]) / (step - last[0])
        return float(min(_MAX_INTERVAL_STEPS, max(1, int(_LOOK_EVERY_S / max(step_s, 1e-6)))))


def _checksum(names: list[str]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))


def _packed(sums: LoggedSums, names: list[str]) -> list[float]:
    # Names are not sent: their checksum, summed, shows whether all ranks with data have the same ones.
    spoke = sums.weight > 0
    numbers = [sums.weight, sums.loss, float(spoke), _checksum(names) if spoke else 0.0]
    numbers += [sums.values.get(name, 0.0) for name in names]
    return numbers + [0.0] * (_LOGGED_LENGTH - len(numbers))


def _unpacked(own: LoggedSums, total: list[float], names: list[str]) -> LoggedStep:
    weight, loss, num_spoke, checksums = total[:_FIRST_VALUE]
    # Every rank with data sees a difference, those without values too.
    if (own.weight > 0 or names) and checksums != num_spoke * _checksum(names):
        raise CollectiveError(
            f"the ranks' losses came with values of different names (here: {', '.join(names) or 'none'}); "
            f"return the same names on every rank"
        )
    if not weight:
        return LoggedStep(own.step, math.nan, {})
    values = zip(names, total[_FIRST_VALUE:], strict=False)
    return LoggedStep(own.step, loss / weight, {name: value / weight for name, value in values})


_FIRST_VALUE = 4
MAX_VALUES = 56
_LOGGED_LENGTH = _FIRST_VALUE + MAX_VALUES
