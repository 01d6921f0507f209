"""What the ranks agree on while they train: one reduction of a few numbers, running beside backward().

Its length depends only on whether the step is logged, which every rank knows. Where nothing has to be voted on, the
reduction is left out of most steps: rank 0 says in each one how many steps later the next is, so that a stop request is
noticed within about a quarter of a second and a loop of 4 ms steps hardly pays for it.
"""

from __future__ import annotations

import dataclasses
import time
import zlib

import torch

from hvdtrain.backends import Backend
from hvdtrain.backends.base import Pending
from hvdtrain.errors import CollectiveError, ContractError

_LOOK_EVERY_S = 0.1
_MAX_INTERVAL_STEPS = 64


@dataclasses.dataclass
class Said:
    """What one rank says in a step; all of it is summed over the ranks.

    Attributes:
        stop: this rank was asked to stop.
        has_next, next_samples: the ballot on the next group.
        weight: weight of this rank's microbatches in this step.
        loss: sum of weight x loss over them (logged steps).
        values: sums of weight x value by name (logged steps).
    """

    stop: bool = False
    has_next: float = 0.0
    next_samples: float = 0.0
    weight: float = 0.0
    loss: float = 0.0
    values: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Heard:
    """The sums."""

    stop: bool
    num_ranks_with_next: float
    next_samples: float
    weight: float
    loss: float
    values: dict[str, float]


class Control:
    """Starts and finishes the reductions; every rank must call `start` in the same steps, which `is_due` tells."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._next_step = 0
        self._last: tuple[int, float] | None = None
        self._names: list[str] = []

    def is_due(self, step: int) -> bool:
        """Whether the ranks have agreed to speak in this step."""
        return step >= self._next_step

    def start(self, step: int, said: Said, *, logged: bool) -> Pending[Heard]:
        """Start the reduction. Collective; call it between forward and backward of the last microbatch."""
        # A rank without data has no values, but root has to know what the others' sums are called.
        self._names = names = sorted(said.values) or self._names
        if len(names) > MAX_VALUES:
            raise ContractError(
                f"the loss came with {len(names)} values to be logged; at most {MAX_VALUES} are possible"
            )
        interval = self._interval(step) if self._backend.world.is_root else 0.0
        numbers = [float(said.stop), interval, said.has_next, said.next_samples, said.weight]
        if logged:
            # Names are not sent: their checksum, summed, shows whether all ranks with data have the same ones.
            checksum = float(zlib.crc32("\0".join(names).encode())) if said.weight else 0.0
            numbers += [said.loss, float(said.weight > 0), checksum, *(said.values.get(name, 0.0) for name in names)]
            numbers += [0.0] * (_LOGGED_LENGTH - len(numbers))
        pending = self._backend.start_sum(
            torch.tensor(numbers, dtype=torch.float64), "control.logged" if logged else "control"
        )

        def finish() -> Heard:
            sums = pending.wait().tolist()
            self._next_step = step + max(1, round(sums[1]))
            values: dict[str, float] = {}
            if logged:
                self._check_names(sums, names, spoke=said.weight > 0)
                values = dict(zip(names, sums[_FIRST_VALUE:], strict=False))
            return Heard(sums[0] > 0, sums[2], sums[3], sums[4], sums[5] if logged else 0.0, values)

        return Pending(finish)

    @staticmethod
    def _check_names(sums: list[float], names: list[str], *, spoke: bool) -> None:
        # Every rank with data sees a difference, those without values too.
        if (spoke or names) and sums[7] != sums[6] * float(zlib.crc32("\0".join(names).encode())):
            raise CollectiveError(
                f"the ranks' losses came with values of different names (here: {', '.join(names) or 'none'}); "
                f"return the same names on every rank"
            )

    def _interval(self, step: int) -> float:
        """Steps until the next look, from how long the last ones took."""
        now_s = time.monotonic()
        last, self._last = self._last, (step, now_s)
        if last is None or step <= last[0]:
            return 1.0
        step_s = (now_s - last[1]) / (step - last[0])
        return float(min(_MAX_INTERVAL_STEPS, max(1, int(_LOOK_EVERY_S / max(step_s, 1e-6)))))


_FIRST_VALUE = 8
MAX_VALUES = 56
_LOGGED_LENGTH = _FIRST_VALUE + MAX_VALUES
