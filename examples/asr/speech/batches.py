"""Dynamic batches: utterances of like length packed into microbatches of at most so many frames."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.errors import UserError
from speech.prepared import Item, PreparedSplit
from speech.units import Units


class Batch(NamedTuple):
    """A microbatch of N utterances.

    Attributes:
        features: [N, T, num_mels] float32, zeros beyond num_frames.
        num_frames: [N] int64.
        characters: [N, U] int64, zeros beyond num_characters.
        num_characters: [N] int64.
        split: which split it is from, as its place in the list of splits.
    """

    features: Tensor
    num_frames: Tensor
    characters: Tensor
    num_characters: Tensor
    split: int


def pack(items: Sequence[Item], max_frames: int, *, seed: int) -> list[list[Item]]:
    """Divide utterances into microbatches whose padded size (utterances x frames of the longest) is at most max_frames.

    Sorted by length, ties and near ties (within a tenth of a second) in random order, so that little is padded and
    speakers mix. The same division on every rank; the trainer shuffles the microbatches in each epoch and deals them to
    the ranks. An utterance that is longer than max_frames makes a microbatch of its own.
    """
    draw = random.Random(seed)
    ordered = sorted(items, key=lambda item: (item.num_frames // 10, draw.random()))
    batches: list[list[Item]] = []
    longest = 0
    for item in ordered:
        longest = max(longest, item.num_frames)
        if not batches or longest * (len(batches[-1]) + 1) > max_frames:
            batches.append([])
            longest = item.num_frames
        batches[-1].append(item)
    return batches


class Microbatches(Dataset[Batch]):
    """Finished microbatches of one or more splits, for `batch_size: null`.

    Args:
        max_frames: largest padded size of a microbatch, in frames of 10 ms.
        num_masks: bands of filters, and as many stretches of time, that are replaced by the utterance's mean
            (SpecAugment, Park et al. 2019, https://arxiv.org/abs/1904.08779); 0: the features as they are.
    """

    def __init__(
        self, splits: Sequence[PreparedSplit], units: Units, *, max_frames: int, seed: int, num_masks: int = 0
    ) -> None:
        self._units, self._num_masks = units, num_masks
        self._splits = splits
        self._batches = [
            (place, batch) for place, split in enumerate(splits) for batch in pack(split.items, max_frames, seed=seed)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def items(self, index: int) -> list[Item]:
        """The utterances of a microbatch, in its order."""
        return self._batches[index][1]

    def __getitem__(self, index: int) -> Batch:
        place, items = self._batches[index]
        found = [torch.from_numpy(self._splits[place].features(item)) for item in items]
        if self._num_masks:
            found = [mask(features, self._num_masks) for features in found]
        characters = [torch.tensor(self._units.encode(item.txt)) for item in items]
        return Batch(
            torch.nn.utils.rnn.pad_sequence(found, batch_first=True),
            torch.tensor([len(features) for features in found]),
            torch.nn.utils.rnn.pad_sequence(characters, batch_first=True),
            torch.tensor([len(text) for text in characters]),
            place,
        )


def mask(features: Tensor, num_masks: int) -> Tensor:
    """SpecAugment on features [T, num_mels]: bands of up to a fifth of the filters, stretches of up to 120 ms."""
    num_frames, num_mels = features.shape
    mean = features.mean(dim=0)
    masked = features.clone()
    for size, widest, axis in ((num_mels, num_mels // 5, 1), (num_frames, min(12, num_frames // 4), 0)):
        for _ in range(num_masks):
            width = int(torch.randint(widest + 1, ()))
            first = int(torch.randint(size - width + 1, ()))
            if axis == 1:
                masked[:, first : first + width] = mean[first : first + width]
            else:
                masked[first : first + width] = mean
    return masked


def check_ctc(splits: Sequence[PreparedSplit], units: Units) -> None:
    """CTC needs a frame for each character and a blank between two equal ones; without them its loss is infinite.

    Raises:
        UserError: names the first utterance that is spoken too fast for frames of 40 ms.
    """
    for split in splits:
        for item in split.items:
            numbers = np.array(units.encode(item.txt))
            needed = len(numbers) + int((numbers[1:] == numbers[:-1]).sum())
            if (item.num_frames + 3) // 4 < needed:
                raise UserError(
                    f"utterance {item.key}: {item.num_frames} frames are too few for {len(numbers)} characters (one "
                    f"frame of 40 ms each); remove it from the corpus"
                )
