"""The training data of this rank: from a task's dataset and a position in the run to groups of microbatches."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from hvdtrain.config import Config
from hvdtrain.data.groups import Group, GroupSource, PlannedGroups, VotedGroups
from hvdtrain.data.loader import EpochSampler, map_loader, stream_loader
from hvdtrain.data.order import StepPlan, derived_seed
from hvdtrain.data.seeding import SeededStream, SideStream
from hvdtrain.errors import CheckpointError, UserError
from hvdtrain.launch import World

logger = logging.getLogger(__name__)

Vote = Callable[[tuple[float, float]], tuple[float, float]]


class Feed:
    """Epochs of groups of microbatches, from any position on.

    Args:
        task: for its `train_dataset()` and, if it has one, `collate`.
        vote: sums a pair of numbers over the ranks (see `VotedGroups`).
        pin_memory: for copies to a GPU.

    Raises:
        UserError: the dataset is empty or neither a map nor an iterable one.
    """

    def __init__(self, task: Any, config: Config, world: World, *, vote: Vote, pin_memory: bool = False) -> None:
        self._config, self._world, self._vote = config, world, vote
        self._dataset = task.train_dataset()
        self.is_stream = isinstance(self._dataset, IterableDataset)
        collate = getattr(task, "collate", None)
        self._accumulate = config.accumulate
        # Microbatches of this rank that earlier steps of the epoch used; and the stream's state at that point.
        self._microbatches_used = 0
        self._state: Any = None
        if self.is_stream:
            self._stream = SeededStream(self._dataset, config.seed, world.rank)
            self._loader = stream_loader(
                self._stream, batch_size=config.batch_size, collate=collate, num_workers=config.num_workers,
                pin_memory=pin_memory,
            )  # fmt: skip
            return
        if not hasattr(self._dataset, "__len__") or not hasattr(self._dataset, "__getitem__"):
            raise UserError(
                f"train_dataset() returned a {type(self._dataset).__name__}: it needs __len__ and __getitem__, or to "
                f"be a torch.utils.data.IterableDataset"
            )
        if len(self._dataset) == 0:
            raise UserError("train_dataset() is empty: there is nothing to train on")
        self._sampler = EpochSampler(
            len(self._dataset), rank=world.rank, size=world.size, batch_size=config.batch_size or 1,
            shuffle=config.shuffle, seed=config.seed,
        )  # fmt: skip
        self._loader = map_loader(
            self._dataset, self._sampler, seed=config.seed, rank=world.rank, collate=collate,
            finished=config.batch_size is None, num_workers=config.num_workers, pin_memory=pin_memory,
        )  # fmt: skip

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of a whole epoch; None where nobody knows."""
        return None if self.is_stream else self._plan(0).num_steps

    def epoch(self, epoch: int, used: int) -> GroupSource:
        """The groups of an epoch after the first `used` samples of it. Iterating may vote: every rank has to.

        Args:
            used: samples of the epoch that earlier steps used, over all ranks (of a map dataset).
        """
        if self.is_stream:
            return self._stream_epoch(epoch)
        self._sampler.set_position(epoch, used)
        loader = iter(self._loader)
        if self._config.batch_size is None:
            # An item is a finished microbatch, and how many samples it has shows only when it is there.
            return VotedGroups(loader, self._accumulate, size=self._world.size, stop=self._stops, vote=self._vote)
        return PlannedGroups(loader, self._plan(used), self._accumulate)

    def items_in_step(self, group: Group, used: int) -> int:
        """How far a step moves the cursor: items of the dataset, over all ranks."""
        # A microbatch of a finished item may hold any number of samples; the cursor counts items of a map dataset.
        return group.num_samples if self.is_stream else self._plan(used).samples(0)

    @property
    def _stops(self) -> bool:
        return self._config.uneven_data == "stop"

    def _plan(self, used: int) -> StepPlan:
        per_step = (self._config.batch_size or 1) * self._accumulate
        return StepPlan(len(self._dataset) - used, self._world.size, per_step, stop=self._stops)

    # ---- streams ----

    def _stream_epoch(self, epoch: int) -> GroupSource:
        config = self._config
        self._stream.set_epoch(epoch)
        skip, state = self._microbatches_used, self._state
        if state is not None:
            self._dataset.load_state_dict(state)
            skip = 0
        # Streams are read ahead of the step that uses them: their random numbers come from a stream of their own.
        side = SideStream(derived_seed(config.seed, self._world.rank, epoch))
        started: list[Iterator[Any]] = []

        def read() -> Iterator[tuple[Any, int]]:
            started.append(iter(self._loader))
            yield from itertools.islice(started[0], skip, None)

        loader = read()
        first = True

        @contextlib.contextmanager
        def reading() -> Iterator[None]:
            nonlocal first
            if not first:
                self._microbatches_used += config.accumulate
            first = False
            self._state = self._own_state()
            with side.use():
                yield

        return VotedGroups(
            loader, self._accumulate, size=self._world.size, stop=self._stops, vote=self._vote, reading=reading
        )

    def _own_state(self) -> Any:
        # Workers have copies of the dataset: their state is not to be had from here.
        if self._config.num_workers == 0 and hasattr(self._dataset, "state_dict"):
            return copy.deepcopy(self._dataset.state_dict())
        return None

    def end_epoch(self) -> None:
        """The next epoch starts from its beginning."""
        self._microbatches_used, self._state = 0, None

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, besides the cursor, to go on in mid-epoch."""
        return {"microbatches": self._microbatches_used, "dataset": self._state}

    def load_state_dicts(self, states: list[dict[str, Any]], *, in_mid_epoch: bool) -> None:
        """From the checkpoint's states of all ranks that saved it.

        Raises:
            CheckpointError: a stream in mid-epoch with another number of ranks, whose dataset has no state of its own.
        """
        if not self.is_stream or not in_mid_epoch:
            return
        same_size = len(states) == self._world.size
        mine = states[self._world.rank] if same_size else states[0]
        if not same_size and mine["dataset"] is None:
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch by {len(states)} rank(s) and this job has {self._world.size}; "
                f"the dataset is iterable and has no state_dict(), so nobody knows which samples are left. Use "
                f"{len(states)} rank(s), a checkpoint from the end of an epoch, or give the dataset state_dict "
                f"and load_state_dict"
            )
        self._microbatches_used, self._state = mine["microbatches"], mine["dataset"]


def fingerprint(batch: Any) -> str:
    """A short digest of a batch, to notice that all ranks read the same samples."""
    digest = hashlib.sha256()
    stack = [batch]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            digest.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        else:
            with contextlib.suppress(Exception):
                digest.update(pickle.dumps(item))
    return digest.hexdigest()[:16]
