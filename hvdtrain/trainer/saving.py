"""What goes into a checkpoint, and what comes out of one. Only the root touches files; the rest goes by broadcast."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.backends import Backend, Replica
from hvdtrain.checkpoint import (
    CheckpointStore,
    Found,
    config_differences,
    match_names,
    refuse_changed,
    rng_state,
    set_rng_state,
)
from hvdtrain.config import Config
from hvdtrain.data.feed import Feed
from hvdtrain.data.order import derived_seed
from hvdtrain.data.seeding import seed_all
from hvdtrain.errors import CheckpointError, UserError
from hvdtrain.precision import Precision
from hvdtrain.trainer.length import RunLength
from hvdtrain.trainer.loop import Loop
from hvdtrain.trainer.position import Position
from hvdtrain.trainer.schedule import Schedule

logger = logging.getLogger(__name__)
T = TypeVar("T")


def on_root(backend: Backend, call: Callable[[], T]) -> T | None:
    """Run `call` on the root; a UserError there is raised on every rank. Collective. The others get None."""
    result, message, kind = None, None, UserError
    if backend.world.is_root:
        try:
            result = call()
        except UserError as error:
            message, kind = str(error), type(error)
    message, kind = backend.broadcast_object((message, kind))
    if message is not None:
        raise kind(message)
    return result


class Saving:
    """Saves and restores one job's state."""

    def __init__(
        self,
        store: CheckpointStore | None,
        config: Config,
        backend: Backend,
        replica: Replica,
        feed: Feed,
        precision: Precision,
        schedule: Schedule,
        length: RunLength,
        position: Position,
        loop: Loop,
    ) -> None:
        self._store, self._config, self._backend, self._replica = store, config, backend, replica
        self._feed, self._precision, self._schedule, self._position = feed, precision, schedule, position
        self._length, self._loop = length, loop
        self.saved_step: int | None = None

    def would_be_best(self, metrics: dict[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be the best by `checkpoint.best`. Collective.

        Raises:
            UserError: the evaluation has no metric of that name.
        """
        if self._config.checkpoint.best is None:
            return False
        store = self._store
        best = on_root(self._backend, lambda: store is not None and store.would_be_best(metrics))
        return bool(self._backend.broadcast_object(best))

    def save(self, metrics: dict[str, float] | None = None) -> Path | None:
        """Write a checkpoint of this moment. Collective. Returns its path on the root."""
        self._replica.sync_buffers()
        rank_states = self._backend.all_gather_object({**rng_state(), "data": self._feed.state_dict()})
        self.saved_step = self._position.step
        if self._store is None:
            return None
        state = {
            "format": 1,
            **self._replica.state_dict(),
            "scheduler": self._schedule.state_dict(),
            "scaler": {**self._precision.state_dict(), "weight_reference": self._loop.weight_reference},
            "progress": self._position.to_dict(),
            "rng": {"ranks": rank_states},
            "config": self._config.to_dict(),
        }
        return self._store.save(state, step=self._position.step, metrics=metrics)

    def resume(self, found: Found | None) -> bool:
        """Continue from what the root found. Collective; `found` counts on the root alone. False: nothing to resume.

        Raises:
            CheckpointError: the checkpoint does not fit the model, the optimizer or the configuration.
        """
        small = None
        if found is not None:
            small = {key: found.state[key] for key in ("scheduler", "scaler", "progress", "rng", "config")}
        small = self._backend.broadcast_object(small)
        if small is None:
            return False
        refuse_changed(small["config"], self._config.to_dict())
        states = small["rng"]["ranks"]
        changes = config_differences(small["config"], self._config.to_dict())
        if self._backend.world.is_root:
            for line in changes:
                logger.info("changed since the checkpoint: %s", line)
            if len(states) != self._backend.world.size:
                logger.info("the checkpoint is of %d rank(s), this job has %d", len(states), self._backend.world.size)
        on_root(self._backend, lambda: self._load(found))
        self._replica.broadcast_state()
        self._loop.weight_reference = small["scaler"].pop("weight_reference", None)
        self._precision.load_state_dict(small["scaler"])
        progress = small["progress"]
        self._position.epoch, self._position.step = progress["epoch"], progress["step"]
        self._position.samples_in_epoch = progress["samples_in_epoch"]
        data = [state["data"] for state in states]
        self._feed.load_state_dicts(data, in_mid_epoch=self._position.samples_in_epoch > 0)
        saved_lr = self._schedule.lr
        self._length.measure(self._config, self._feed, self._position)
        self._schedule.resume(small["scheduler"], self._position.step - self._precision.skipped_steps)
        if self._backend.world.is_root:
            self._tell_learning_rate(changes, saved_lr)
        # Last: what the user's code drew until here must not count.
        self._restore_random_numbers(states)
        self.saved_step = self._position.step
        return True

    def _tell_learning_rate(self, changes: list[str], saved_lr: float) -> None:
        schedule, size = self._schedule, self._backend.world.size
        # Other ranks or another batch ask for another rate too, where it is scaled.
        scaled_anew = self._config.lr.scaling != "none" and schedule.asked_lr != schedule.base_lr
        if scaled_anew or any(line.startswith(("optimizer.", "lr.scaling", "lr.base_batch")) for line in changes):
            logger.warning(
                "the optimizer's options, the learning rate among them, stay those of the checkpoint: %.6g, where this "
                "job on %d rank(s) asks for %.6g; to change them, start another run from its weights",
                schedule.base_lr,
                size,
                schedule.asked_lr,
            )
        if schedule.lr != saved_lr or any(line.startswith(("lr.schedule", "lr.warmup_steps")) for line in changes):
            logger.warning(
                "warm-up and schedule are those of this job from step %d on, as if they had been from the start: the "
                "learning rate is %.6g there, and would have been %.6g",
                self._position.step + 1,
                schedule.lr,
                saved_lr,
            )

    def _load(self, found: Found | None) -> None:
        assert found is not None
        model = self._replica.bare_model
        try:
            weights = match_names(found.state["model"], model.state_dict())
            self._replica.load_state_dict({"model": weights, "optimizer": found.state["optimizer"]})
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{found.path} does not fit this task: {error}. Use the task, task_options and optimizer that it was "
                f"saved with, or another --output"
            ) from error

    def _restore_random_numbers(self, states: list[dict[str, Any]]) -> None:
        world = self._backend.world
        if len(states) == world.size:
            set_rng_state({key: value for key, value in states[world.rank].items() if key != "data"})
        else:
            seed_all(derived_seed(self._config.seed, world.rank, self._position.step))
