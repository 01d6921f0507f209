"""Where a step's time goes: averages of one rank, all ranks together, and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hvdtrain.profiling.step_clock import PHASES, StepSpans, length

_SHOWN = {
    "data_wait": "data wait",
    "forward": "forward",
    "backward": "backward",
    "communication": "communication not hidden",
    "optimizer": "optimizer",
    "other": "other",
}
UNDER_WAY = "under_way"
STEP = "step"


@dataclasses.dataclass
class Totals:
    """Sums over the steps of one rank.

    Attributes:
        seconds: by phase; `under_way`: communication, hidden or not; `step`: everything.
    """

    num_steps: int = 0
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys((*PHASES, UNDER_WAY, STEP), 0.0)
    )

    def add(self, step: StepSpans) -> None:
        """Count a step."""
        self.num_steps += 1
        for name, seconds in step.seconds().items():
            self.seconds[name] += seconds
        self.seconds[UNDER_WAY] += length(step.under_way) / 1e9
        self.seconds[STEP] += (step.end_ns - step.start_ns) / 1e9

    def mean_ms(self) -> dict[str, float]:
        """Milliseconds per step, by phase; nothing where no step was counted."""
        return (
            {name: seconds * 1000 / self.num_steps for name, seconds in self.seconds.items()} if self.num_steps else {}
        )

    def take(self) -> dict[str, float]:
        """`mean_ms` of what was counted since the last call."""
        found = self.mean_ms()
        self.num_steps, self.seconds = 0, dict.fromkeys(self.seconds, 0.0)
        return found


def summarize(ranks: Sequence[tuple[int, dict[str, float]]], *, traced: bool) -> dict[str, Any] | None:
    """All ranks together, as in summary.json.

    Args:
        ranks: (number of steps, `Totals.mean_ms`) of each rank.
        traced: torch.profiler was recording meanwhile, which makes the steps slower.

    Returns:
        {"steps", "traced", "step_ms", "phases": {phase: {"ms", "share", "ms_of_ranks"}}, "communication":
        {"under_way_ms", "not_hidden_ms", "not_hidden_share"}}; means over the ranks. `share` is of the step,
        `not_hidden_share` of `under_way_ms` (null where nothing was under way). None: no step was counted.
    """
    counted = [(steps, means) for steps, means in ranks if means]
    if not counted:
        return None
    mean = {name: sum(means[name] for _, means in counted) / len(counted) for name in counted[0][1]}
    under_way, not_hidden = mean[UNDER_WAY], mean["communication"]
    return {
        "steps": min(steps for steps, _ in counted),
        "traced": traced,
        "step_ms": mean[STEP],
        "phases": {
            name: {
                "ms": mean[name],
                "share": mean[name] / mean[STEP],
                "ms_of_ranks": [means[name] for _, means in counted],
            }
            for name in PHASES
        },
        "communication": {
            "under_way_ms": under_way,
            "not_hidden_ms": not_hidden,
            "not_hidden_share": not_hidden / under_way if under_way > 0 else None,
        },
    }


def _title(summary: dict[str, Any]) -> str:
    num_ranks = len(summary["phases"]["forward"]["ms_of_ranks"])
    while_traced = ", while they were traced, which slows them" if summary["traced"] else ""
    return f"Where a step's time goes (mean of {summary['steps']:,} steps on {num_ranks} rank(s){while_traced})"


def _rows(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, found in summary["phases"].items():
        least, most = min(found["ms_of_ranks"]), max(found["ms_of_ranks"])
        rows.append((_SHOWN[name], f"{found['ms']:.2f}", f"{found['share']:.1%}", f"{least:.2f} to {most:.2f}"))
    return [*rows, ("step", f"{summary['step_ms']:.2f}", "100.0%", "")]


def _communication(summary: dict[str, Any]) -> str:
    found = summary["communication"]
    if found["not_hidden_share"] is None:
        return "No communication."
    return (
        f"Communication was under way for {found['under_way_ms']:.2f} ms of a step; {found['not_hidden_share']:.0%} of "
        f"that was not hidden by computation."
    )


def text_table(summary: dict[str, Any]) -> str:
    """For a terminal, without a newline at the end."""
    rows = [("", "ms", "share", "of ranks, ms"), *_rows(summary)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}".rstrip()
        for row in rows
    ]
    return "\n".join([_title(summary), *lines, f"  {_communication(summary)}"])


def markdown_table(summary: dict[str, Any]) -> str:
    """For TensorBoard's text page."""
    lines = [f"| {' | '.join(row)} |" for row in _rows(summary)]
    head = ["| phase | ms | share | of ranks, ms |", "|---|---:|---:|---:|"]
    return "\n".join([f"{_title(summary)}.", "", *head, *lines, "", _communication(summary)])
