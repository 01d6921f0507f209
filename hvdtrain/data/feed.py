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
from hvdtrain.data.seeding import SeededStream, own_random_numbers
from hvdtrain.errors import CheckpointError, ContractError, UserError
from hvdtrain.launch import World

logger = logging.getLogger(__name__)

Vote = Callable[[tuple[float, float]], tuple[float, float]]
# Every rank's value, in order of rank.
Gather = Callable[[Any], list[Any]]


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
        self._config, self._world, self.vote = config, world, vote
        self._dataset = task.train_dataset()
        self.is_stream = isinstance(self._dataset, IterableDataset)
        collate = getattr(task, "collate", None)
        self._accumulate = config.accumulate
        # Microbatches of this rank that earlier steps of the epoch used; and the stream's state at that point.
        self._microbatches_used = 0
        self._state: Any = None
        self._copies_checked = False
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
        return self.steps_left(0)

    def steps_left(self, used: int) -> int | None:
        """Steps of an epoch of which `used` samples are used, over all ranks; None where nobody knows."""
        return None if self.is_stream else self._plan(used).num_steps

    def epoch(self, epoch: int, used: int) -> GroupSource:
        """The groups of an epoch after the first `used` samples of it. Iterating may vote: every rank has to.

        Args:
            used: samples of the epoch that earlier steps used, over all ranks (of a map dataset).
        """
        if self.is_stream:
            self._stream.set_epoch(epoch, self._state)
            skip = 0 if self._state is not None else self._microbatches_used
        else:
            self._sampler.set_position(epoch, used)
            skip = 0
            if self._config.batch_size is not None:
                return PlannedGroups(iter(self._loader), self._plan(used), self._accumulate)
        # An item may be a finished microbatch, and how many samples it has shows only when it is there.
        return self._voted(epoch, skip)

    def _voted(self, epoch: int, skip: int) -> VotedGroups:
        """Groups that are read ahead of the step that uses them, after the first `skip` microbatches."""
        accumulate = self._accumulate
        read = self._microbatches_used - skip
        loader: Iterator[Any] | None = None

        def take(count: int) -> list[tuple[Any, int]]:
            # The random numbers of a group depend on its place in the epoch: a resumed run draws the same ones.
            nonlocal loader, read
            with own_random_numbers(derived_seed(self._config.seed, self._world.rank, epoch, read)):
                if loader is None:
                    loader = iter(self._loader)
                read += count
                return list(itertools.islice(loader, count))

        def take_next() -> list[tuple[Any, int]]:
            nonlocal skip
            while skip > 0:
                taken = min(skip, accumulate)
                take(taken)
                skip -= taken
            # What the next step will use is read already when this one is saved.
            self._microbatches_used = read
            self._state = self._own_state()
            return take(accumulate)

        return VotedGroups(take_next, size=self._world.size, stop=self._stops, vote=self.vote)

    def items_in_step(self, group: Group, used: int) -> int:
        """How far a step moves the cursor: items of the dataset, over all ranks."""
        if self.is_stream or self._config.batch_size is not None:
            return group.num_samples
        # A finished microbatch is one item and may hold any number of samples; the cursor counts items.
        return self._plan(used).samples(0)

    def end_epoch(self) -> None:
        """The next epoch starts from its beginning."""
        self._microbatches_used, self._state = 0, None

    @property
    def _stops(self) -> bool:
        return self._config.uneven_data == "stop"

    def _plan(self, used: int) -> StepPlan:
        per_step = (self._config.batch_size or 1) * self._accumulate
        return StepPlan(len(self._dataset) - used, self._world.size, per_step, stop=self._stops)

    def _own_state(self) -> Any:
        # Workers have copies of the dataset: their state is not to be had from here.
        if self.is_stream and self._config.num_workers == 0 and hasattr(self._dataset, "state_dict"):
            return copy.deepcopy(self._dataset.state_dict())
        return None

    # ---- agreement of the ranks ----

    def check_lengths(self, gather: Gather) -> None:
        """Every rank must shard the same map dataset. Collective.

        Raises:
            ContractError: the ranks' datasets are of different kinds or lengths.
        """
        found = gather(None if self.is_stream else len(self._dataset))
        if len(set(found)) > 1:
            said = ", ".join(
                f"rank {rank}: {'iterable' if length is None else length}" for rank, length in enumerate(found)
            )
            raise ContractError(
                f"train_dataset() differs between ranks ({said}). A map dataset is the whole one, the same on every "
                f"rank, and the trainer deals it out; for a rank's own samples make an IterableDataset"
            )

    def warn_of_copies(self, source: GroupSource, gather: Gather) -> None:
        """Notice, in the first epoch of a run, that all ranks of a stream read the same samples. Collective."""
        if self._copies_checked or not self.is_stream or self._world.size == 1:
            return
        self._copies_checked = True
        source.read_ahead()
        first = source.peek()
        found = gather(None if first is None else fingerprint(first))
        if self._world.is_root and found[0] is not None and len(set(found)) == 1:
            logger.warning(
                "all %d ranks read the same first microbatch. The trainer does not split an iterable dataset: it has "
                "to yield this rank's samples alone (hvdtrain.world() tells rank and size)",
                self._world.size,
            )

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, besides the cursor, to go on in mid-epoch."""
        if not self.is_stream:
            return {"length": len(self._dataset), "microbatches": self._microbatches_used}
        return {
            "microbatches": self._microbatches_used,
            "dataset": self._state,
            "batch_size": self._config.batch_size,
            "num_workers": self._config.num_workers,
        }

    def load_state_dicts(self, states: list[dict[str, Any]], *, in_mid_epoch: bool) -> None:
        """From the checkpoint's states of all ranks that saved it.

        Raises:
            CheckpointError: the rest of the epoch cannot be found: the dataset changed; or a stream without a state of
                its own is read by another number of ranks or workers, or in other microbatches.
        """
        if not in_mid_epoch:
            return
        same_size = len(states) == self._world.size
        mine = states[self._world.rank] if same_size else states[0]
        if self.is_stream != ("length" not in mine):
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch with {'a map' if self.is_stream else 'an iterable'} dataset; "
                f"this task has {'an iterable' if self.is_stream else 'a map'} one"
            )
        if self.is_stream:
            self._load_stream(mine, len(states))
            return
        if mine["length"] != len(self._dataset):
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch with {mine['length']} samples, and train_dataset() has "
                f"{len(self._dataset)} now: the rest of the epoch is not known. Use the same data, or a checkpoint "
                f"from the end of an epoch"
            )
        self._microbatches_used = mine["microbatches"] if same_size else 0

    def _load_stream(self, mine: dict[str, Any], num_ranks: int) -> None:
        if mine["dataset"] is None:
            now = {
                "rank(s)": (num_ranks, self._world.size),
                "worker(s) each (num_workers)": (mine["num_workers"], self._config.num_workers),
                "samples in a microbatch (batch_size)": (mine["batch_size"], self._config.batch_size),
            }
            for what, (then, here) in now.items():
                if then != here:
                    raise CheckpointError(
                        f"the checkpoint was saved in mid-epoch by {then} {what} and this job has {here}; the dataset "
                        f"is iterable and has no state_dict() to ask, so nobody knows which samples are left. Use "
                        f"{then} {what}, a checkpoint from the end of an epoch, or give the dataset state_dict and "
                        f"load_state_dict (and num_workers: 0)"
                    )
        elif self._config.num_workers > 0:
            raise CheckpointError(
                f"the checkpoint was saved in mid-epoch by the dataset's own state_dict(), which is possible with "
                f"num_workers: 0 alone; this job has {self._config.num_workers}. Continue with num_workers: 0"
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
