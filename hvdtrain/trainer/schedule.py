"""The learning rate: scaled to the effective batch, warmed up, then on its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.config import Config


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


def scale_learning_rate(config: Config, optimizer: torch.optim.Optimizer, size: int) -> float:
    """Scale the rate of every group, once, before a scheduler is made. Returns the first group's rate.

    A resumed run loads its optimizer's groups from the checkpoint afterwards, so nothing is scaled twice.
    """
    factor = scale_factor(config, size)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


def make_scheduler(task: Any, config: Config, optimizer: torch.optim.Optimizer, total_steps: int | None) -> Any:
    """The task's scheduler, or warm-up and schedule of the YAML. Stepped once after each step that was not skipped.

    Raises:
        ConfigError: a schedule that falls to zero at the end, and nobody knows when the end is.
    """
    if callable(getattr(task, "scheduler", None)):
        return task.scheduler(optimizer)
    if config.lr.schedule != "constant" and total_steps is None:
        raise config.error(
            "lr.schedule",
            f"{config.lr.schedule} falls to zero at the last step, and with iterable data only max_steps tells it",
        )
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _factor(config, total_steps))


def _factor(config: Config, total_steps: int | None) -> Callable[[int], float]:
    warmup, schedule = config.lr.warmup_steps, config.lr.schedule

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if schedule == "constant" or total_steps is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
