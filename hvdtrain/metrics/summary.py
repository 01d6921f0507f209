"""summary.json: how a run ended, for programs; and the end report, for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.atomic import atomic_write
from hvdtrain.launch.world import World
from hvdtrain.metrics.plain_json import to_json
from hvdtrain.metrics.progress import shown_metrics

_NAME = "summary.json"
_OPTIONAL = ("failure", "profile")


@dataclasses.dataclass
class Summary:
    """How a run ended.

    Attributes:
        status: "stopped": on request, a checkpoint is saved; "failed": see `failure`.
        world: the place of rank 0; its size is the number of ranks.
        steps: optimizer steps of the whole run, earlier sessions included; skipped ones count.
        epochs: complete passes over the data, likewise.
        skipped_steps: steps whose gradient was not finite, left out by every rank.
        samples_per_second: over all ranks, evaluation and checkpoints not counted.
        eval: the last evaluation.
        parameters_sha256: of the final parameters (see `parameters_sha256`); None if the run failed before its end.
        ranks_agree: every rank has the same bits; None if that was not compared.
        failure: what failed first (rank, host, ...); only of a failed run.
        profile: where a step's time went; only of a run with --profile.
    """

    status: Literal["done", "stopped", "failed"]
    backend: str
    launcher: str
    transport: str | None
    world: World
    steps: int = 0
    epochs: int = 0
    skipped_steps: int = 0
    samples_per_second: float | None = None
    eval: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parameters_sha256: str | None = None
    ranks_agree: bool | None = None
    failure: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As in summary.json; `failure` and `profile` only where there is one."""
        document = dataclasses.asdict(self)
        return {key: value for key, value in document.items() if key not in _OPTIONAL or value is not None}


def write_summary(summary: Summary, output: Path) -> Path:
    """Write `summary.json` in the output folder, whole or not at all.

    Raises:
        TrainingFailed: it cannot be written.
    """
    path = output / _NAME
    with atomic_write(path) as file:
        file.write(to_json(summary.to_dict(), indent=2).encode() + b"\n")
    return path


def clear_summary(output: Path) -> None:
    """Remove the summary of an earlier session when a new one starts: a killed run must not look done."""
    (output / _NAME).unlink(missing_ok=True)


def end_report(summary: Summary, output: Path, *, checkpoint: Path | None = None, best: Path | None = None) -> str:
    """A few lines on how the run ended and where its results are, without a newline at the end."""
    lines = [_headline(summary)]
    if summary.eval:
        lines.append(f"  evaluation   {shown_metrics(summary.eval)}")
    if summary.skipped_steps:
        lines.append(f"  skipped      {_count(summary.skipped_steps, 'step')} with a gradient that was not finite")
    if summary.ranks_agree is False:
        lines.append("  WARNING      the ranks ended with different parameters")
    lines.append(f"  results      {output} (config.yaml, metrics.jsonl, summary.json)")
    if checkpoint is not None:
        lines.append(f"  checkpoint   {checkpoint}")
    if best is not None and best != checkpoint:
        lines.append(f"  best         {best}")
    if summary.profile is not None and summary.profile["traces"]:
        traces = f"{output / 'traces'} (open one in ui.perfetto.dev or chrome://tracing)"
        lines.append(f"  traces       {traces}")
    lines.append(f"  curves       tensorboard --logdir {output / 'tensorboard'}")
    return "\n".join(lines)


def _headline(summary: Summary) -> str:
    where = f"{_count(summary.world.size, 'rank')}, {summary.backend}"
    if summary.transport:
        where += f" over {summary.transport}"
    steps = f"{_count(summary.steps, 'step')}, {_count(summary.epochs, 'epoch')}"
    speed = f", {summary.samples_per_second:,.0f} samples/s" if summary.samples_per_second else ""
    if summary.status == "done":
        return f"Done: {steps} on {where}{speed}"
    if summary.status == "stopped":
        return f"Stopped on request after {steps} on {where}{speed}. Continue with --resume auto"
    return f"Failed after {steps} on {where}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
