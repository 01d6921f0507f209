"""What loaders yield, random numbers of the data, and moving batches."""

from __future__ import annotations

import contextlib
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset

from hvdtrain.data.device import to_device
from hvdtrain.data.feed import fingerprint
from hvdtrain.data.loader import CountedCollate, EpochSampler, leading_size, map_loader, stream_loader
from hvdtrain.data.seeding import SeededStream, own_random_numbers


class Squares(Dataset):
    def __init__(self, length=5):
        self.length, self.epochs = length, []

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __getitem__(self, index):
        return torch.tensor([index, index**2])


class InOneGo(Squares):
    def __getitems__(self, indices):
        return torch.tensor([[index, index**2] for index in indices])


def loader(dataset, batch_size=2, finished=False, collate=None):
    sampler = EpochSampler(len(dataset), rank=0, size=1, batch_size=batch_size, shuffle=False, seed=1)
    sampler.set_position(2, 0)
    return map_loader(
        dataset, sampler, seed=1, rank=0, collate=collate, finished=finished, num_workers=0, pin_memory=False
    )


@pytest.mark.parametrize("dataset", [Squares, InOneGo])
def test_a_map_loader_counts_its_samples(dataset):
    found = [(batch.tolist(), count) for batch, count in loader(dataset())]
    assert found == [([[0, 0], [1, 1]], 2), ([[2, 4], [3, 9]], 2), ([[4, 16]], 1)]


def test_a_dataset_is_told_its_epoch_once():
    dataset = Squares()
    iterated = loader(dataset)
    list(iterated)
    list(iterated)
    assert dataset.epochs == [2]


def test_an_own_collate_gets_the_samples():
    found = [(batch, count) for batch, count in loader(Squares(3), collate=lambda samples: len(samples) * 10)]
    assert found == [(20, 2), (10, 1)]


class Finished(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize(
    ("item", "count"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4)], 4),  # a list of one stays a list
        ({"images": torch.zeros(5, 2), "labels": torch.zeros(5)}, 5),
        ((torch.zeros(2), torch.zeros(7)), 2),
        ("text", 1),
        (torch.tensor(1.0), 1),
        (np.zeros((6, 2), dtype=np.float32), 6),
    ],
)
def test_finished_microbatches_of_a_stream_come_through_as_they_are(item, count):
    stream = SeededStream(Finished([item]), seed=1, rank=0)
    ((batch, found),) = stream_loader(stream, batch_size=None, collate=None, num_workers=0, pin_memory=False)
    assert found == count
    # As torch does without automatic batching: arrays become tensors, and plain tuples lists.
    assert type(batch) is {np.ndarray: torch.Tensor, tuple: list}.get(type(item), type(item))


def test_finished_microbatches_of_a_map_dataset():
    assert [(batch.tolist(), count) for batch, count in loader(Squares(2), batch_size=1, finished=True)] == [
        ([0, 0], 2),
        ([1, 1], 2),
    ]


def test_finished_items_that_are_lists_stay_lists():
    batch, count = CountedCollate(None, finished=True)([[torch.zeros(4)]])
    assert isinstance(batch, list)
    assert count == 4


def test_the_leading_size_is_of_the_first_tensor():
    assert leading_size({"a": "x", "b": [1, torch.zeros(3)]}) == 3
    assert leading_size([]) == 1


def numbers():
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_own_random_numbers_leave_the_others_where_they_were():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = [numbers(), numbers()]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    first = numbers()
    with own_random_numbers(7):
        inside = numbers()
    with contextlib.suppress(KeyError), own_random_numbers(8):
        numbers()
        raise KeyError
    assert [first, numbers()] == expected
    with own_random_numbers(7):
        assert numbers() == inside
    assert inside not in expected


def test_a_fingerprint_tells_batches_apart():
    same = [{"x": torch.arange(3.0), "y": ["a", 1]}, {"x": torch.arange(3.0), "y": ["a", 1]}]
    assert fingerprint(same[0]) == fingerprint(same[1])
    others = [torch.arange(3.0), torch.arange(4.0), [torch.arange(3.0), "b"], "a", "b"]
    assert len({fingerprint(other) for other in [same[0], *others]}) == 6
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
    assert fingerprint(torch.tensor([1.0]).bfloat16()) != fingerprint(torch.tensor([2.0]).bfloat16())


Pair = namedtuple("Pair", ["left", "right"])


class Moves:
    def to(self, device):
        return f"moved to {device}"


def test_batches_go_to_the_device_whatever_they_are():
    meta = torch.device("meta")
    batch = {"a": torch.zeros(2), "b": [torch.zeros(1), 3], "c": (torch.zeros(1),), "d": Pair(torch.zeros(1), "x")}
    moved = to_device({**batch, "e": Moves(), "f": None}, meta)
    assert moved["a"].device == moved["b"][0].device == moved["c"][0].device == moved["d"].left.device == meta
    assert moved["b"][1] == 3
    assert isinstance(moved["c"], tuple)
    assert isinstance(moved["d"], Pair)
    assert moved["e"] == "moved to meta"
    assert moved["f"] is None
    assert to_device(batch, torch.device("cpu")) is batch


def test_sizes_of_packed_sequences_stay_on_the_cpu():
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    (moved, _) = to_device([packed, 1], torch.device("meta"))
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.tolist() == [2, 2, 1]
