"""Contestants take turns in short blocks of steps, so that a machine whose speed drifts slows all of them alike:
what was measured, and the ratios within the rounds."""

from __future__ import annotations

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Milliseconds per step of each contestant, one number per round."""

    ms_per_step: dict[str, list[float]]

    def __add__(self, later: Blocks) -> Blocks:
        """These rounds and, after them, those of another contest of the same contestants."""
        names = self.ms_per_step.keys() | later.ms_per_step.keys()
        return Blocks({name: self.ms_per_step.get(name, []) + later.ms_per_step[name] for name in names})

    def median_ms(self, name: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.ms_per_step[name])

    def ratio(self, name: str, base: str) -> float:
        """Median of the ratios within each round."""
        pairs = zip(self.ms_per_step[name], self.ms_per_step[base], strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def split_evenly(total: int, parts: int) -> list[int]:
    """A number as a sum of at most so many positive ones that differ by one at most: 5 in 3 parts is 2 + 2 + 1."""
    parts = min(total, parts)
    return [total // parts + (part < total % parts) for part in range(parts)]
