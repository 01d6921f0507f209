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
        self._state: Any = None

    def set_epoch(self, epoch: int, state: Any = None) -> None:
        """Of the next iteration, in this process and in its workers; `state`, of the dataset, in this process alone."""
        self._epoch[0] = epoch
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        epoch = int(self._epoch[0])
        worker = get_worker_info()
        if worker is not None:
            seed_all(derived_seed(self._seed, self._rank, worker.id, epoch))
        _set_epoch(self.dataset, epoch)
        state, self._state = self._state, None
        if state is not None:
            self.dataset.load_state_dict(state)
        return iter(self.dataset)


@contextlib.contextmanager
def own_random_numbers(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Random numbers inside come from generators seeded with `seed`; those outside are where they were before.

    For data that is read ahead of the step that uses it, in the rank's own process: it would otherwise move the
    generators that dropout uses, by how far ahead the reader is.

    Args:
        device: a CUDA device whose generator is included; the CPU's always are.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_cuda = device is not None and device.type == "cuda"
    cuda_state = torch.cuda.get_rng_state(device) if device is not None and on_cuda else None
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which seeds every device.
    torch.default_generator.manual_seed(seed)
    if on_cuda:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
