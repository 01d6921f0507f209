"""When Horovod reduced: its hooks send a gradient off as soon as it is there, `synchronize()` waits for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hvdtrain.backends.reductions import Reduction, ReductionWatch


class HorovodReductions(ReductionWatch):
    """Hooks of its own note when gradients are there, and a wrapper when `synchronize()` returns.

    Args:
        reducer: the DistributedOptimizer.
        communicates: whether the backward pass that is going on sends gradients off.
    """

    def __init__(self, reducer: Any, parameters: Sequence[nn.Parameter], communicates: Callable[[], bool]) -> None:
        self._communicates = communicates
        self._first_ns = self._last_ns = 0
        self._found: list[Reduction] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]
        synchronize = reducer.synchronize

        def timed_synchronize() -> None:
            called_ns = time.time_ns()
            synchronize()
            # Without a gradient of its own (no data left) this rank sends zeros from within synchronize().
            started, computed = (self._first_ns, self._last_ns) if self._first_ns else (called_ns, called_ns)
            self._found.append(Reduction(started, computed, time.time_ns()))
            self._first_ns = 0

        reducer.synchronize = timed_synchronize

    def _gradient_is_there(self, _: Any) -> None:
        if self._communicates():
            self._last_ns = time.time_ns()
            if not self._first_ns:
                self._first_ns = self._last_ns

    def take(self) -> list[Reduction]:
        found, self._found = self._found, []
        return found
