"""Run a whole job on the ranks of a pool, and look at what it left."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

SMALL_TASKS = Path(__file__).parent / "tasks" / "small_tasks.py"


@dataclasses.dataclass
class Ran:
    """One job on all ranks.

    Attributes:
        status: the exit status, the same on every rank.
        seen: by rank: what each training loss was given.
    """

    status: int
    output: Path
    seen: list[list[Any]]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.output / "summary.json").read_text())

    @property
    def sha256(self) -> str:
        summary = self.summary
        assert summary["ranks_agree"] is True
        return summary["parameters_sha256"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of steps."""
        return [line for line in self._lines() if "eval" not in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [line for line in self._lines() if "eval" in line]

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.output / "checkpoints").glob("*.pt"))

    def checkpoint(self, step: int | None = None) -> dict[str, Any]:
        """Of a step, or the last."""
        name = self.checkpoints()[-1] if step is None else f"step-{step:08d}.pt"
        return torch.load(self.output / "checkpoints" / name, weights_only=True)

    @property
    def w(self) -> list[float]:
        """The final parameter of a linear task; the same on every rank."""
        assert self.summary["ranks_agree"] is True
        return self.checkpoint()["model"]["w"].tolist()

    def samples(self) -> list[Any]:
        """What all ranks saw, one list, in no order that means anything."""
        return [sample for rank in self.seen for batch in rank for sample in batch]


def job(task: str, output: Path, **keys: Any) -> dict[str, Any]:
    """A configuration as a dict, with what makes small cases exact."""
    name = task if ":" in task else f"{SMALL_TASKS}:{task}"
    small = {
        "task": name,
        "output": str(output),
        "device": "cpu",
        "epochs": 1,
        "batch_size": 1,
        "shuffle": False,
        "log_every_steps": 1,
        "optimizer": {"name": "SGD", "lr": 0.1},
        "checkpoint": {"every_steps": None},
    }
    return {**small, **keys}


def train_here(backend: Any, tree: dict[str, Any], resume: str = "none") -> tuple[int, list[Any]]:
    """On one rank: train, return the exit status and what the losses were given."""
    from hvdtrain.config import Config
    from hvdtrain.trainer import train_on

    forget()
    config = Config.model_validate({**tree, "backend": backend.name})
    status = train_on(backend, config, resume=resume)
    return status, seen()


def train_and_listen(backend: Any, tree: dict[str, Any], resume: str = "none") -> list[str]:
    """On one rank: train; what the trainer and the data logged."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    keep = Keep()
    loggers = [logging.getLogger(f"hvdtrain.{name}") for name in ("trainer", "data")]
    for logger in loggers:
        logger.addHandler(keep)
    try:
        train_here(backend, tree, resume)
    finally:
        for logger in loggers:
            logger.removeHandler(keep)
    return messages


def stop_here(backend: Any, tree: dict[str, Any], resume: str = "none") -> tuple[int, list[Any]]:
    """As train_here, with the stop request of this rank's guard at the task's hand, and taken back afterwards."""
    from hvdtrain.config import Config
    from hvdtrain.failure.stop import StopSignals
    from hvdtrain.task import load_task

    load_task(Config.model_validate(tree))
    # A request is for the life of a process, and the pool's ranks live on.
    stop = backend.guard._stop
    backend.guard._stop = StopSignals()
    sys.modules["small_tasks"].STOP[0] = backend.guard.request_stop
    try:
        return train_here(backend, tree, resume)
    finally:
        backend.guard._stop = stop


def forget() -> None:
    if "small_tasks" in sys.modules:
        sys.modules["small_tasks"].SEEN.clear()


def seen() -> list[Any]:
    return list(sys.modules["small_tasks"].SEEN) if "small_tasks" in sys.modules else []


def run(pool: Any, tree: dict[str, Any], resume: str = "none", limit_s: float = 60.0) -> Ran:
    """Train on every rank of the pool."""
    outcomes = pool.run(train_here, tree, resume, limit_s=limit_s)
    statuses = {status for status, _ in outcomes}
    assert len(statuses) == 1, f"the ranks ended differently: {outcomes}"
    return Ran(statuses.pop(), Path(tree["output"]), [found for _, found in outcomes])
