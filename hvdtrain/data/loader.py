"""torch's DataLoader, set up so that what it yields is (batch, number of samples)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from hvdtrain.data.order import epoch_order, share
from hvdtrain.data.seeding import Fetch, SeededDataset, SeededStream
from hvdtrain.failure.workers import init_worker

Collate = Callable[[Any], Any]


class EpochSampler:
    """Yields [Fetch, index, ...], one list per microbatch of this rank, from a cursor on."""

    def __init__(self, num_samples: int, *, rank: int, size: int, batch_size: int, shuffle: bool, seed: int) -> None:
        self._num_samples, self._rank, self._size = num_samples, rank, size
        self._batch_size, self._shuffle, self._seed = batch_size, shuffle, seed
        self._epoch, self._start = 0, 0

    def set_position(self, epoch: int, start: int) -> None:
        """Of the next iteration: the epoch, and how many samples of its order are already used."""
        self._epoch, self._start = epoch, start

    def __iter__(self) -> Iterator[list[Any]]:
        order = epoch_order(self._num_samples, shuffle=self._shuffle, seed=self._seed, epoch=self._epoch)
        mine = share(order, self._start, self._rank, self._size)
        for first in range(0, len(mine), self._batch_size):
            position = self._start + self._rank + first * self._size
            yield [Fetch(self._epoch, position), *mine[first : first + self._batch_size]]

    def __len__(self) -> int:
        remaining = len(range(self._start + self._rank, self._num_samples, self._size))
        return -(-remaining // self._batch_size)


class CountedCollate:
    """Collates, and counts the samples. Top level, so that spawned workers can unpickle it.

    Args:
        finished: items are finished microbatches. A map dataset's come in a list of one, a stream's as they are.
    """

    def __init__(self, collate: Collate | None, *, finished: bool, listed: bool = True) -> None:
        self._collate, self._finished, self._listed = collate, finished, listed

    def __call__(self, samples: Any) -> tuple[Any, int]:
        if self._finished:
            # As torch does without automatic batching: numpy arrays become tensors.
            item: Any = samples[0] if self._listed and isinstance(samples, list) else samples
            item = default_convert(item)  # type: ignore[no-untyped-call]
            return item, leading_size(item)
        if self._collate is not None:
            return self._collate(samples), _num_samples(samples)
        if isinstance(samples, list):
            return default_collate(samples), len(samples)
        return samples, leading_size(samples)  # __getitems__ gave a finished microbatch


def _num_samples(samples: Any) -> int:
    return len(samples) if isinstance(samples, list) else leading_size(samples)


def leading_size(batch: Any) -> int:
    """The first size of the first tensor in a batch: its number of samples; 1 where there is no tensor."""
    found = _first_tensor(batch)
    return 1 if found is None or found.dim() == 0 else int(found.shape[0])


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    items: Sequence[Any] = ()
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = value
    return next((tensor for item in items if (tensor := _first_tensor(item)) is not None), None)


def map_loader(
    dataset: Any,
    sampler: EpochSampler,
    *,
    seed: int,
    rank: int,
    collate: Collate | None,
    finished: bool,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[Any]:
    """A loader over a map dataset in the sampler's order. Set the sampler's position before each iteration."""
    return DataLoader(
        SeededDataset(dataset, seed, rank),
        batch_sampler=sampler,
        collate_fn=CountedCollate(collate, finished=finished),
        **_common(num_workers, pin_memory),
    )


def stream_loader(
    stream: SeededStream,
    *,
    batch_size: int | None,
    collate: Collate | None,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader[Any]:
    """A loader over this rank's own samples."""
    return DataLoader(
        stream,
        batch_size=batch_size,
        collate_fn=CountedCollate(collate, finished=batch_size is None, listed=False),
        **_common(num_workers, pin_memory),
    )


def _common(num_workers: int, pin_memory: bool) -> dict[str, Any]:
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": pin_memory,
        "worker_init_fn": start_worker,
        # Its own generator: starting an epoch would otherwise draw from the one that dropout uses.
        "generator": torch.Generator().manual_seed(0),
    }


def start_worker(worker_id: int) -> None:
    """In a new worker: what `init_worker` does, and use one thread."""
    init_worker(worker_id)
    torch.set_num_threads(1)
