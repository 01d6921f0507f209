"""Epochs: steps, evaluations, checkpoints and the agreed stop, in one order on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.backends import Backend, Replica
from hvdtrain.config import Config
from hvdtrain.data.feed import Feed
from hvdtrain.errors import TrainingFailed
from hvdtrain.precision import Precision
from hvdtrain.trainer.evaluation import Evaluation
from hvdtrain.trainer.loop import Loop
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.saving import Saving
from hvdtrain.trainer.show import Show


class Session:
    """One run of the job from where it stands to its end or to an agreed stop.

    Attributes:
        metrics: of the last evaluation.
        stopped: the ranks agreed to stop on request.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        replica: Replica,
        feed: Feed,
        loop: Loop,
        evaluation: Evaluation,
        saving: Saving,
        precision: Precision,
        position: Position,
        show: Show,
    ) -> None:
        self._config, self._backend, self._replica, self._feed = config, backend, replica, feed
        self._loop, self._evaluation, self._saving = loop, evaluation, saving
        self._precision, self._position, self._show = precision, position, show
        self._evaluated_step = -1
        self.metrics: dict[str, float] = {}
        self.stopped = False

    def run(self) -> bool:
        """Train until the end. Collective. Returns True when stopped on request (a checkpoint is saved then)."""
        for _ in self.steps():
            pass
        if not self.stopped:
            self._evaluate()
        if self._saving.saved_step != self._position.step:
            self._save()
        self._backend.barrier()
        return self.stopped

    def steps(self) -> Iterator[None]:
        """Train, yielding after each step, once all that belongs to it (log, evaluation, checkpoint) is done."""
        self._replica.model.train()
        self._show.start()
        while not self.stopped and not self._is_over():
            yield from self._epoch()

    def flush(self) -> None:
        """Show and write what was logged until now. Collective; for whoever ends `steps` before its end."""
        self._show.results(self._loop.flush())

    def _is_over(self) -> bool:
        config, position = self._config, self._position
        return (config.epochs is not None and position.epoch >= config.epochs) or (
            config.max_steps is not None and position.step >= config.max_steps
        )

    def _epoch(self) -> Iterator[None]:
        position, every = self._position, self._config.checkpoint.every_steps
        self._show.start_epoch(position.epoch)
        source = self._feed.epoch(position.epoch, position.samples_in_epoch)
        self._feed.warn_of_copies(source, self._backend.all_gather_object)
        first_step, was_fresh = position.step, position.samples_in_epoch == 0
        for group, step in self._loop.steps(source):
            position.samples_in_epoch += self._feed.items_in_step(group, position.samples_in_epoch)
            ends_epoch = group.last_of_epoch
            saves = every is not None and position.step % every == 0
            if ends_epoch or saves or step.stop or self._is_over():
                # What was logged of the steps until here is shown, and on the disk, before what follows.
                step.results += self._loop.flush()
            self._show.step(step, source)
            if ends_epoch:
                self._end_epoch()
            if saves and self._saving.saved_step != position.step:
                self._save()
            self.stopped = step.stop and not self._is_over()
            yield
            if self.stopped or ends_epoch or self._is_over():
                return
        if position.step == first_step and not was_fresh:
            # Resumed by another number of ranks, for which what is left of the epoch makes no step.
            self._end_epoch()
        elif position.step == first_step:
            raise TrainingFailed(
                f"epoch {position.epoch} had no step: "
                + (
                    "no rank's dataset yielded a sample"
                    if self._config.uneven_data == "fill"
                    else "with uneven_data: stop a rank without a single sample ends it"
                )
                + f" (world size {self._backend.world.size}). Check the dataset, or use fewer ranks"
            )

    def _end_epoch(self) -> None:
        self._position.epoch += 1
        self._position.samples_in_epoch = 0
        self._feed.end_epoch()
        self._show.end_epoch()
        every = self._config.eval.every_epochs
        if every is not None and self._position.epoch % every == 0:
            self._evaluate()

    def _evaluate(self) -> None:
        if not self._evaluation.is_possible or self._evaluated_step == self._position.step:
            return
        with self._show.evaluation():
            self.metrics = self._evaluation.run(self._replica, self._precision)
        self._evaluated_step = self._position.step
        self._show.evaluated(self.metrics)
        if self._saving.would_be_best(self.metrics):
            self._save()

    def _save(self) -> None:
        with self._show.saving():
            metrics = self.metrics if self._evaluated_step == self._position.step else None
            self._saving.save(metrics)
