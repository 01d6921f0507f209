"""Contestants take turns in short blocks of steps, so that a machine whose speed drifts slows all of them alike."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Milliseconds per step of each contestant, one number per round."""

    ms_per_step: dict[str, list[float]]

    def median_ms(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.ms_per_step[name])

    def ratio(self, name: str, base: str) -> float:
        """Median of the ratios within each round."""
        pairs = zip(self.ms_per_step[name], self.ms_per_step[base], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def take_turns(
    contestants: Mapping[str, Callable[[int], None]], *, rounds: int, steps: int, before: Callable[[], None]
) -> Blocks:
    """Let each contestant run `steps` steps in each round, in an order that rotates. Collective.

    Args:
        contestants: name -> function that runs a number of steps.
        before: called before each block; a barrier, so that no rank starts late.
    """
    names = list(contestants)
    for name in names:  # warm-up: buckets are rebuilt, caches filled
        before()
        contestants[name](max(3, steps // 2))
    measured: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            before()
            start_s = time.perf_counter()
            contestants[name](steps)
            measured[name].append((time.perf_counter() - start_s) * 1000 / steps)
    return Blocks(measured)
