"""Which checkpoint is the best one by a metric, remembered across restarts in `best.json`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.atomic import atomic_write
from hvdtrain.errors import UserError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class BestRule:
    """Keep the checkpoint whose metric is highest ("max") or lowest ("min")."""

    metric: str
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise UserError(f"checkpoint.best.mode is {self.mode!r}: it must be max or min")

    def value(self, metrics: Mapping[str, float]) -> float:
        """The metric as a float.

        Raises:
            UserError: there is no such metric; the message has those that there are.
        """
        if self.metric not in metrics:
            raise UserError(
                f"checkpoint.best.metric is {self.metric!r}, but the evaluation gives: {', '.join(sorted(metrics))}"
            )
        return float(metrics[self.metric])

    def better(self, new: float, old: float) -> bool:
        return new > old if self.mode == "max" else new < old


class BestRecord:
    """Metric values of the checkpoints in a folder, in `best.json`.

    The value is written before its checkpoint is complete, and values without a checkpoint are ignored: so a process
    that dies in between loses nothing.
    """

    def __init__(self, folder: Path, rule: BestRule | None) -> None:
        self._path = folder / "best.json"
        self._rule = rule
        self._values: dict[int, float] = self._read() if rule else {}

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The best of these steps (the earliest among equals), or None if none of them has a value."""
        best: int | None = None
        for step in sorted(steps):
            if step not in self._values:
                continue
            if best is None or (self._rule and self._rule.better(self._values[step], self._values[best])):
                best = step
        return best

    def would_be_best(self, metrics: Mapping[str, float], steps: Iterable[int]) -> bool:
        """Whether a checkpoint with these metrics would be the best; False without a rule, and for NaN."""
        if self._rule is None:
            return False
        value = self._rule.value(metrics)
        best = self.best_of(steps)
        return not math.isnan(value) and (best is None or self._rule.better(value, self._values[best]))

    def record(
        self, step: int, metrics: Mapping[str, float] | None, steps: Iterable[int], *, replaces: bool = False
    ) -> None:
        """Note the value of the checkpoint about to be written.

        Args:
            steps: those that stay beside it.
            replaces: it takes the place of another run's checkpoint of this step, whose value it has not.
        """
        if self._rule is None:
            return
        kept = set(steps) | (set() if replaces else {step})
        values = {known: value for known, value in self._values.items() if known in kept}
        if metrics is not None:
            value = self._rule.value(metrics)
            # NaN is never the best, and a value of an earlier run of this step is not this one's.
            values.pop(step, None)
            if not math.isnan(value):
                values[step] = value
        if values == self._values:
            return
        self._values = values
        document = {
            "metric": self._rule.metric,
            "mode": self._rule.mode,
            "best": self.best_of(values),
            "values": {str(known): value for known, value in sorted(values.items())},
        }
        with atomic_write(self._path) as file:
            file.write(json.dumps(document, indent=2).encode() + b"\n")

    def _read(self) -> dict[int, float]:
        assert self._rule is not None
        try:
            document: Any = json.loads(self._path.read_text())
            rule = BestRule(document["metric"], document["mode"])
            values = {int(step): float(value) for step, value in document["values"].items()}
        except FileNotFoundError:
            return {}
        except Exception as error:  # whatever is in there, training can go on without it
            logger.warning(
                "%s cannot be read (%s): earlier checkpoints no longer compete for the best", self._path, error
            )
            return {}
        if rule != self._rule:
            logger.warning(
                "%s was kept for %s (%s), now it is %s (%s): earlier checkpoints no longer compete for the best",
                self._path,
                rule.metric,
                rule.mode,
                self._rule.metric,
                self._rule.mode,
            )
            return {}
        return values
