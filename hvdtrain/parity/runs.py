"""The runs that are compared: the same job under both backends, with each compression that was asked for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench.ranks import run_ranks
from hvdtrain.config import Config, load_config

_BACKENDS = ("ddp", "horovod")
# What the trainer must not do in these few steps, and that every one of them is to be logged.
_OVERRIDES = ("log_every_steps=1", "eval.every_epochs=null", "checkpoint.every_steps=null", "checkpoint.best=null")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that is to be made."""

    backend: str
    compression: str
    overrides: tuple[str, ...]
    output: Path

    @property
    def name(self) -> str:
        """Short: `ddp`, `horovod fp16`."""
        return self.backend if self.compression == "none" else f"{self.backend} {self.compression}"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that was made: the plan, and what the ranks said (see `rank.rank`)."""

    plan: Planned
    said: dict[str, Any]

    @property
    def losses(self) -> list[float | None]:
        """Of each step, over all ranks; None: not finite."""
        found: list[float | None] = self.said["losses"]
        return found


def plan_runs(
    file: str, compressions: Sequence[str], overrides: Sequence[str], output: str | None
) -> tuple[list[Planned], Config]:
    """Which runs, reference first, and the job as it is written. Nothing is started.

    Args:
        compressions: none for the file's own.
        output: folder of the certificate; None: the job's output folder and `-parity`.

    Raises:
        ConfigError: the job file, an override or a combination of backend and compression is wrong.
    """
    config = load_config(file, overrides)
    wanted = list(dict.fromkeys(compressions)) or [config.compression]
    folder = Path(output) if output is not None else Path(f"{config.output}-parity")
    plans = []
    # Uncompressed first: it is what the others are compared with.
    for compression in sorted(wanted, key=lambda name: name != "none"):
        for backend in _BACKENDS:
            mine = (*overrides, *_OVERRIDES, f"compression={compression}")
            plans.append(Planned(backend, compression, mine, folder / "runs" / f"{backend}-{compression}"))
            # Before the first run is made: the second must not be what finds a mistake.
            load_config(file, mine, backend=backend, output=str(plans[-1].output))
    return plans, config


def make_run(plan: Planned, file: str, *, steps: int, num_ranks: int, limit_s: float) -> Run:
    """Start the ranks of a run on this machine and wait for them.

    Raises:
        UserError: a rank found the input wrong (its message is on standard error).
        TrainingFailed: a rank failed, or the limit passed.
    """
    print(f"parity: {plan.name}, {steps} steps on {num_ranks} rank(s) ...", file=sys.stderr, flush=True)
    arguments = {
        "file": file,
        "overrides": list(plan.overrides),
        "backend": plan.backend,
        "output": str(plan.output),
        "steps": steps,
    }
    said = run_ranks("hvdtrain.parity.rank:rank", arguments, num_ranks=num_ranks, limit_s=limit_s)
    return Run(plan, said)
