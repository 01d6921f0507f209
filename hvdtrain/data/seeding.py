"""Random numbers of the data: reproducible in workers, persistent workers and after a resume.

A fetch (the indices of one microbatch) carries its epoch and its position. A worker seeds its generators from
(seed, rank, epoch, position) before it touches the dataset, so that augmentation does not depend on which worker a
microbatch lands on, nor on where a run was resumed. The worker's number cannot be part of it for that reason.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvdtrain.data.order import derived_seed


class Fetch(NamedTuple):
    """What is to be fetched: the first item of every list of indices that the sampler yields."""

    epoch: int
    position: int


def seed_all(value: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def _set_epoch(dataset: Any, epoch: int) -> None:
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class SeededDataset(Dataset[Any]):
    """A map dataset that takes lists of [Fetch, index, index, ...]. Calls `set_epoch` of the dataset if it has one."""

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self._seed, self._rank = seed, rank
        self._epoch = -1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, request: list[Any]) -> Any:
        fetch, *indices = request
        if get_worker_info() is not None:
            seed_all(derived_seed(self._seed, self._rank, fetch.epoch, fetch.position))
        if fetch.epoch != self._epoch:
            self._epoch = fetch.epoch
            _set_epoch(self.dataset, fetch.epoch)
        fetch_many = getattr(self.dataset, "__getitems__", None)
        return fetch_many(indices) if callable(fetch_many) else [self.dataset[index] for index in indices]


class SeededStream(IterableDataset[Any]):
    """An iterable dataset whose generators, in workers, are seeded from (seed, rank, worker, epoch).

    The epoch lives in shared memory: persistent workers never see another change of the dataset.
    """

    def __init__(self, dataset: Any, seed: int, rank: int) -> None:
        self.dataset = dataset
        self._seed, self._rank = seed, rank
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Of the next iteration, in this process and in its workers."""
        self._epoch[0] = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch[0])
        worker = get_worker_info()
        if worker is not None:
            seed_all(derived_seed(self._seed, self._rank, worker.id, epoch))
        _set_epoch(self.dataset, epoch)
        return iter(self.dataset)


class SideStream:
    """A second set of generators for data that is read in the rank's own process ahead of the step that uses it.

    Reading ahead would otherwise move the generators that dropout uses, by how far ahead the reader is.
    """

    def __init__(self, seed: int) -> None:
        with self._kept():
            seed_all(seed)
            self._mine = self._states()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Random numbers inside come from this stream."""
        with self._kept():
            self._restore(self._mine)
            yield
            self._mine = self._states()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        before = self._states()
        try:
            yield
        finally:
            self._restore(before)

    @staticmethod
    def _states() -> tuple[Any, Any, torch.Tensor]:
        return random.getstate(), np.random.get_state(), torch.get_rng_state()

    @staticmethod
    def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
