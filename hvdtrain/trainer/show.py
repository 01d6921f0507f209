"""What the run shows and writes while it goes on: on the root; on the other ranks every method costs a comparison."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hvdtrain.backends import Backend
from hvdtrain.config import Config
from hvdtrain.data.groups import GroupSource
from hvdtrain.metrics import MetricsWriter, Progress, ThroughputMeter
from hvdtrain.profiling import Profiled
from hvdtrain.trainer.control import LoggedStep
from hvdtrain.trainer.epoch_watch import EpochWatch
from hvdtrain.trainer.loop import Step
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.schedule import Schedule, effective_batch, scale_factor

logger = logging.getLogger(__name__)


class Show:
    """Progress line, metrics files, throughput, and the lines at the start."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        position: Position,
        total_steps: int | None,
        *,
        resumed: bool,
        watch: EpochWatch | None = None,
    ) -> None:
        self._config, self._backend, self._position = config, backend, position
        self._total_steps, self._resumed = total_steps, resumed
        self._is_root = backend.world.is_root
        self._meter = ThroughputMeter()
        self._progress = Progress(
            enabled=self._is_root, total_steps=total_steps, first_step=position.step, num_epochs=config.epochs
        )
        self._writer = (
            MetricsWriter(Path(config.output), resume_step=position.step if resumed else None)
            if self._is_root
            else None
        )
        self._waited_s = 0.0
        self._epoch_of_step = position.epoch
        # Of logged steps whose loss is still on its way.
        self._noted: dict[int, dict[str, Any]] = {}
        self._watch = watch
        # Step and active seconds at which the epoch began.
        self._epoch_start = (position.step, 0.0)

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        if self._writer is not None:
            self._writer.close()

    def announce(self, model: nn.Module, schedule: Schedule) -> None:
        """A few lines on what is about to happen."""
        if not self._is_root:
            return
        config, backend = self._config, self._backend
        world = backend.world
        num_parameters = sum(p.numel() for p in model.parameters())
        logger.info(
            "%s over %s on %s, %d rank(s) on %d host(s), started by %s; %s, %d thread(s) a rank",
            backend.name, backend.transport, backend.device.type, world.size, world.num_nodes, backend.launcher,
            backend.interface, torch.get_num_threads(),
        )  # fmt: skip
        batch = effective_batch(config, world.size)
        said = (
            "dynamic batches"
            if batch is None
            else (
                f"effective batch {batch} = {config.batch_size} x {config.accumulate} accumulated x {world.size} ranks"
            )
        )
        steps = "unknown number of" if self._total_steps is None else f"{self._total_steps:,}"
        logger.info(
            "%s parameters; %s; learning rate %.6g%s; %s steps",
            f"{num_parameters:,}", said, schedule.base_lr, self._about_rate(schedule), steps,
        )  # fmt: skip

    def _about_rate(self, schedule: Schedule) -> str:
        scaling = self._config.lr.scaling
        about = ""
        # A resumed run's base rate is its checkpoint's, which other ranks may have scaled.
        if scaling != "none" and schedule.base_lr == schedule.asked_lr:
            about = f" (scaled {scaling} by {scale_factor(self._config, self._backend.world.size):.4g})"
        if self._resumed and schedule.lr != schedule.base_lr:
            about += f", {schedule.lr:.6g} in step {self._position.step + 1}"
        return about

    def start(self) -> None:
        """The first step is about to begin."""
        self._meter.start()

    def start_epoch(self, epoch: int) -> None:
        """An epoch begins, or goes on after a resume."""
        self._epoch_of_step = epoch
        self._waited_s = 0.0
        self._progress.start_epoch(epoch)
        if self._watch is not None:
            self._watch.epoch_started(epoch)
            self._epoch_start = (self._position.step, self._meter.active_s)

    def end_epoch(self) -> None:
        """An epoch is complete."""
        self._progress.end_epoch()
        if self._watch is not None:
            first_step, start_s = self._epoch_start
            self._watch.epoch_ended(
                self._epoch_of_step, self._position.step - first_step, self._meter.active_s - start_s
            )

    def step(self, step: Step, source: GroupSource) -> None:
        """A step is done."""
        self._meter.add_samples(step.num_samples)
        if not self._is_root:
            return
        self._progress.step(self._position.step)
        if not step.finite:
            reason = "the gradient is not finite" if step.has_weight else "every microbatch had the weight 0"
            logger.warning("step %d: %s; every rank skipped it", self._position.step, reason)
        if step.logged:
            self._note(step, source)
        self.results(step.results)

    def results(self, results: list[LoggedStep]) -> None:
        """Losses of logged steps have arrived."""
        if self._is_root:
            for result in results:
                self._log(result)

    def _note(self, step: Step, source: GroupSource) -> None:
        """All that is logged of a step but its loss, which comes later."""
        self._meter.add_wait(source.waited_s - self._waited_s)
        self._waited_s = source.waited_s
        self._meter.mark()
        self._noted[self._position.step] = {
            "epoch": self._epoch_of_step,
            "grad_norm": step.norm,
            "lr": step.lr,
            "samples_per_second": self._meter.samples_per_second,
            "data_wait_share": self._meter.data_wait_share,
        }

    def _log(self, result: LoggedStep) -> None:
        noted = self._noted.pop(result.step)
        assert self._writer is not None
        self._writer.log(step=result.step, loss=result.loss, values=result.values, **noted)
        self._progress.logged(loss=result.loss, samples_per_second=noted["samples_per_second"])

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Encloses an evaluation; its time does not count as training."""
        with self._meter.paused():
            yield

    def evaluated(self, metrics: dict[str, float]) -> None:
        """An evaluation is done."""
        if self._writer is not None:
            self._writer.log_eval(step=self._position.step, epoch=self._position.epoch, metrics=metrics)
            self._progress.evaluated(metrics)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Encloses a checkpoint. What was logged before it is on the disk before it."""
        with self._meter.paused():
            if self._writer is not None:
                self._writer.flush()
            yield

    def profiled(self, found: Profiled) -> None:
        """The run was profiled: the curves and the table go to TensorBoard."""
        if self._writer is not None:
            self._writer.log_profile(step=self._position.step, points=found.points, table=found.markdown)

    @property
    def samples_per_second(self) -> float:
        """Over the whole session."""
        return self._meter.total_samples_per_second
