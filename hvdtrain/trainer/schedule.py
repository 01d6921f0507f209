"""The learning rate: scaled to the effective batch, warmed up, then on its schedule, across resumes too."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hvdtrain.config import Config
from hvdtrain.trainer.length import RunLength

# Key beside a scheduler's own in a checkpoint: what made the scheduler.
_MADE_BY = "made_by"


def effective_batch(config: Config, size: int) -> int | None:
    """Samples of a full step over all ranks; None with dynamic batches."""
    return None if config.batch_size is None else config.batch_size * config.accumulate * size


def scale_factor(config: Config, size: int) -> float:
    """What the learning rate is multiplied by: Goyal et al. 2017 (linear), Krizhevsky 2014 (square root)."""
    batch = effective_batch(config, size)
    if config.lr.scaling == "none" or batch is None:
        return 1.0
    ratio = batch / config.lr.base_batch
    return ratio if config.lr.scaling == "linear" else math.sqrt(ratio)


def scale_learning_rate(config: Config, optimizer: torch.optim.Optimizer, size: int) -> None:
    """Scale the rate of every group, once, before its `Schedule` is made.

    A resumed run loads its optimizer's groups from the checkpoint afterwards, so nothing is scaled twice.
    """
    factor = scale_factor(config, size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor


class Schedule:
    """The task's scheduler, or warm-up and schedule of the job file, or neither.

    Args:
        optimizer: as it was made and scaled; one that a checkpoint was loaded into needs `resume`.
        length: may be measured again later; a schedule ends where the run ends.

    Attributes:
        asked_lr: the first group's rate before warm-up and schedule, as task, job file and number of ranks have it.

    Raises:
        ConfigError: a schedule that falls to zero at the end, and nobody knows when the end is.
    """

    def __init__(self, task: Any, config: Config, optimizer: torch.optim.Optimizer, length: RunLength) -> None:
        self._task, self._config, self._optimizer, self._length = task, config, optimizer, length
        self._is_task_s = callable(getattr(task, "scheduler", None))
        self.asked_lr = self.base_lr
        self._scheduler = self._make()
        self._made_by = "lr" if not self._is_task_s else f"task: {type(self._scheduler).__name__}"

    @property
    def lr(self) -> float:
        """The first group's rate in the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def base_lr(self) -> float:
        """The first group's rate without warm-up and schedule."""
        return float(_base(self._optimizer.param_groups[0]))

    def step(self) -> None:
        """A step was taken. Not for one that was skipped."""
        if self._scheduler is not None:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; empty where there is no scheduler."""
        return {} if self._scheduler is None else {**self._scheduler.state_dict(), _MADE_BY: self._made_by}

    def resume(self, saved: Mapping[str, Any], steps_taken: int) -> None:
        """Go on from a checkpoint, once the optimizer's groups are loaded and the length is measured.

        The task's scheduler goes on from its saved state. All else follows from the number of steps: a schedule that
        the checkpoint had not, or had in another form, goes on as if it had been there from the start, and one that is
        gone leaves the rate that it started from.

        Args:
            saved: what `state_dict` gave; made by another schedule, or by none, perhaps.
            steps_taken: steps of the whole run, those that were skipped not counted.
        """
        state = dict(saved)
        made_by = state.pop(_MADE_BY, self._made_by)
        if self._is_task_s and state and made_by == self._made_by:
            self._scheduler.load_state_dict(state)
            return
        if not state and self._scheduler is None:
            return
        for group in self._optimizer.param_groups:
            base = _base(group)
            group["initial_lr"] = base.clone() if isinstance(base, torch.Tensor) else base
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base)
            else:
                group["lr"] = base
        if self._is_task_s:
            self._scheduler = self._make()
            with warnings.catch_warnings():
                # torch warns of a scheduler that steps before its optimizer.
                warnings.simplefilter("ignore", UserWarning)
                for _ in range(steps_taken):
                    self._scheduler.step()
        elif self._scheduler is not None:
            self._scheduler = self._make(steps_taken)
            self._scheduler._step_count = steps_taken + 1

    def _make(self, steps_taken: int = 0) -> Any:
        if self._is_task_s:
            return self._task.scheduler(self._optimizer)
        lr = self._config.lr
        if lr.schedule == "constant" and lr.warmup_steps == 0:
            return None
        if lr.schedule != "constant" and self._length.total_steps is None:
            raise self._config.error(
                "lr.schedule",
                f"{lr.schedule} falls to zero at the last step, and with iterable data only max_steps tells it",
            )
        return torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, _factor(self._config, self._length), last_epoch=steps_taken - 1
        )


def _base(group: Mapping[str, Any]) -> Any:
    # Every scheduler of torch leaves there what it started from.
    return group.get("initial_lr", group["lr"])


def _factor(config: Config, length: RunLength) -> Callable[[int], float]:
    warmup, schedule = config.lr.warmup_steps, config.lr.schedule

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant" or length.total_steps is None:
            return 1.0
        # Of a run that always had the ranks and the batch of now.
        step, total = step + length.ahead_steps, length.total_steps + length.ahead_steps
        done = min(1.0, max(0, step - warmup) / max(1, total - warmup))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
