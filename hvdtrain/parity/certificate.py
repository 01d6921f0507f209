"""The certificate: what was run, what was compared, how far apart it was, and whether that is within the tolerance."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hvdtrain.checkpoint.atomic import atomic_write
from hvdtrain.config import Config
from hvdtrain.metrics.plain_json import to_json
from hvdtrain.parity.compare import LossDifference, WeightDifference, compare_losses, compare_weights
from hvdtrain.parity.rank import WEIGHTS
from hvdtrain.parity.runs import Run

_SHOWN_STEPS = 50
_EXPLANATION = (
    "Differences are relative: |a - b| / max(|a|, |b|) for the loss of a step; for a tensor of the final weights the "
    "largest |a - b| in it over the largest |a| or |b| in it (or over the root mean square of all parameters, where "
    "that is larger)."
)


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that pass.

    Attributes:
        plain: where neither run compresses its gradients.
        compressed: where one or both do.
    """

    plain: float = 1e-5
    compressed: float = 5e-2


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs, compared. `problems`: in words, why it did not pass; none: it passed."""

    first: Run
    second: Run
    tolerance: float
    loss: LossDifference
    weights: WeightDifference
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within the tolerance."""
        return not self.problems


def pairs(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Which runs are compared: the backends with the same compression, and each backend with its uncompressed run."""
    found = []
    for at, first in enumerate(runs):
        for second in runs[at + 1 :]:
            same_compression = first.plan.compression == second.plan.compression
            compresses = first.plan.backend == second.plan.backend and first.plan.compression == "none"
            if same_compression or compresses:
                found.append((first, second))
    return found


def compare(first: Run, second: Run, tolerances: Tolerances) -> Comparison:
    """Compare two runs; reads the weights that they left."""
    is_plain = first.plan.compression == second.plan.compression == "none"
    tolerance = tolerances.plain if is_plain else tolerances.compressed
    problems = []
    for run in (first, second):
        if not run.said["ranks_agree"]:
            problems.append(f"the ranks of {run.plan.name} ended with different parameters")
    if len(first.losses) != len(second.losses):
        problems.append(f"{len(first.losses)} and {len(second.losses)} steps")
    num_steps = min(len(first.losses), len(second.losses))
    loss = compare_losses(first.losses[:num_steps], second.losses[:num_steps], tolerance)
    if num_steps == 0:
        problems.append("no step was taken")
    if loss.first_step_beyond is not None:
        problems.append(f"the loss is beyond the tolerance from step {loss.first_step_beyond} on")
    left = [_weights(run) for run in (first, second)]
    weights = compare_weights(left[0]["weights"], left[1]["weights"], frozenset(left[0]["parameters"]))
    if weights.largest_relative > tolerance:
        problems.append(f"the final weights are beyond the tolerance, most of all {weights.tensor}")
    return Comparison(first, second, tolerance, loss, weights, tuple(problems))


def _weights(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run.plan.output / WEIGHTS, weights_only=True)
    return found


def certificate(
    file: str, config: Config, runs: Sequence[Run], comparisons: Sequence[Comparison], *, steps: int, num_ranks: int
) -> dict[str, Any]:
    """Everything as one JSON document."""
    return {
        "format": 1,
        "passed": all(comparison.passed for comparison in comparisons),
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "job": {
            "file": file,
            "sha256": _sha256(Path(file)),
            "task": config.task,
            "task_sha256": None if config.task_file() is None else _sha256(config.task_file()),
            # The job may have fewer than were asked for.
            "steps": min(len(run.losses) for run in runs),
            "steps_asked": steps,
            "ranks": num_ranks,
            "seed": config.seed,
            "precision": config.precision,
            "device": runs[0].said["device"],
        },
        "versions": _versions(),
        "comparisons": [_comparison(comparison) for comparison in comparisons],
        "runs": [
            {
                "name": run.plan.name,
                "backend": run.plan.backend,
                "compression": run.plan.compression,
                **run.said,
                "weights_file": str(run.plan.output / WEIGHTS),
                "weights_file_sha256": _sha256(run.plan.output / WEIGHTS),
            }
            for run in runs
        ],
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "first": comparison.first.plan.name,
        "second": comparison.second.plan.name,
        "passed": comparison.passed,
        "problems": list(comparison.problems),
        "tolerance": comparison.tolerance,
        "loss": dataclasses.asdict(comparison.loss),
        "weights": dataclasses.asdict(comparison.weights),
        "same_parameters_sha256": (
            comparison.first.said["parameters_sha256"] == comparison.second.said["parameters_sha256"]
        ),
    }


def _versions() -> dict[str, str | None]:
    names = ("hvdtrain", "torch", "horovod", "numpy")
    found: dict[str, str | None] = {name: _version(name) for name in names}
    return {**found, "python": platform.python_version(), "platform": platform.platform()}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sha256(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def write_certificate(document: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write `certificate.json` and `certificate.md`; returns their paths."""
    written = []
    for name, text in (
        ("certificate.json", to_json(document, indent=2) + "\n"),
        ("certificate.md", markdown(document)),
    ):
        with atomic_write(folder / name) as file:
            file.write(text.encode())
        written.append(folder / name)
    return written[0], written[1]


def comparison_table(document: dict[str, Any]) -> str:
    """A line per comparison, as a Markdown table."""
    lines = [
        "| compared | tolerance | largest difference of a loss | of the weights | first step that differs | result |",
        "|---|---|---|---|---|---|",
    ]
    for item in document["comparisons"]:
        loss, weights = item["loss"], item["weights"]
        at = f" (step {loss['largest_at_step']})" if loss["largest_at_step"] else ""
        tensor = f" ({weights['tensor']})" if weights["tensor"] else ""
        lines.append(
            f"| {item['first']} and {item['second']} | {item['tolerance']:g} | {_shown(loss['largest_relative'])}{at} "
            f"| {_shown(weights['largest_relative'])}{tensor} | {loss['first_step_that_differs'] or 'none'} "
            f"| {'passed' if item['passed'] else '**failed**'} |"
        )
    return "\n".join(lines)


def _shown(relative: float | None) -> str:
    """As a figure; None is what JSON makes of a number that is not finite."""
    if relative is None or not math.isfinite(relative):
        return "not finite"
    return "0" if relative == 0 else f"{relative:.2g}"


def markdown(document: dict[str, Any]) -> str:
    """The certificate for people."""
    job, versions = document["job"], document["versions"]
    asked = job.get("steps_asked", job["steps"])
    num_steps = f"{job['steps']} steps" + (
        f" (of {asked} asked for: the job has no more)" if asked > job["steps"] else ""
    )
    ran = f"{num_steps} on {job['ranks']} ranks ({job['device']}), seed {job['seed']}, {job['precision']}"
    lines = [
        f"# Parity: {'passed' if document['passed'] else 'FAILED'}",
        "",
        f"`{job['file']}` ({job['task']}), {ran}; {document['made']}.",
        "",
        comparison_table(document),
        "",
        *[
            f"- {item['first']} and {item['second']}: {text}"
            for item in document["comparisons"]
            for text in item["problems"]
        ],
        "",
        _EXPLANATION,
        "",
        "| run | transport | skipped steps | all ranks agree | SHA-256 of the parameters |",
        "|---|---|---|---|---|",
    ]
    for run in document["runs"]:
        lines.append(
            f"| {run['name']} | {run['transport']} | {run['skipped_steps']} | {'yes' if run['ranks_agree'] else 'NO'} "
            f"| `{run['parameters_sha256']}` |"
        )
    names = [run["name"] for run in document["runs"]]
    lines += ["", f"| step | {' | '.join(f'loss, {name}' for name in names)} |", "|---" * (len(names) + 1) + "|"]
    for step, losses in enumerate(zip(*(run["losses"] for run in document["runs"]), strict=False), 1):
        if step > _SHOWN_STEPS:
            lines.append("| ... " * (len(names) + 1) + "|")
            break
        shown = ("not finite" if loss is None else f"{loss:.9g}" for loss in losses)
        lines.append(f"| {step} | {' | '.join(shown)} |")
    said = ", ".join(f"{name} {version or '(not installed)'}" for name, version in versions.items())
    lines += ["", f"Versions: {said}. SHA-256 of the job file: `{job['sha256']}`.", ""]
    return "\n".join(lines)
