"""The result of `hvdtrain bench scaling` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.bench.machine import job_text, machine_text

_LEGEND = (
    "Every rank keeps its batch, so that more ranks take more samples in a step. num_steps_per_gpu: steps that a rank "
    "takes in an epoch. avg_step_time: seconds, median of the rounds. Efficiency: work per time, divided by that of "
    "the smallest number of ranks and by the ranks."
)


def document(result: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    """The whole file; `pictures`: names of picture files beside it."""
    parts = ["# Scaling", conditions(result), table(result), _LEGEND]
    parts += [f"![{name}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def conditions(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    job = result["job"]
    lines = [f"Machine: {machine_text(result['machine'])}."]
    if result["sharing"]:
        lines.append(f"Hosts: {result['sharing']}; bandwidth {result.get('bandwidth') or 'not limited'}.")
    lines.append(f"Job: {job_text(job)}, accumulate {job['accumulate']}, compression {job['compression']}.")
    return "\n".join(lines)


def table(result: dict[str, Any]) -> str:
    """A line per backend and number of ranks."""
    lines = [
        "| backend | hosts | ranks | num_steps_per_gpu | avg_step_time, s | samples/s | speed-up | efficiency |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        steps = "-" if row["num_steps_per_gpu"] is None else f"{row['num_steps_per_gpu']:,}"
        samples = "-" if row["samples_per_s"] is None else f"{row['samples_per_s']:,.0f}"
        lines.append(
            f"| {row['backend']} | {row['hosts']} | {row['ranks']} | {steps} | {row['avg_step_time']:.4f} | {samples} "
            f"| {row['speed_up']:.2f} | {row['efficiency']:.0%} |"
        )
    return "\n".join(lines)
