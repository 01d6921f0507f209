"""What prepare.py writes once and every rank reads: features, list of utterances, units, CMVN."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UserError
from speech.aishell import Utterance

CMVN, UNITS = "global_cmvn.json", "units.txt"


@dataclasses.dataclass(frozen=True)
class Item:
    """An utterance of a prepared split: where its frames are in the split's array, and its text."""

    key: str
    speaker: str
    txt: str
    first_frame: int
    num_frames: int


class PreparedSplit:
    """A split as it lies on the disk: SPLIT.list (JSON lines) and SPLIT.f16 (frames x num_mels
    little-endian float16).

    The array is mapped, not read: the ranks of a host share its pages, and it may be larger than the memory.

    Raises:
        UserError: the files are missing, or do not belong together.
    """

    def __init__(self, folder: Path, split: str) -> None:
        listing, array = folder / f"{split}.list", folder / f"{split}.f16"
        if not listing.is_file() or not array.is_file():
            raise UserError(f"{folder} lacks {split}.list or {split}.f16: run examples/asr/prepare.py first")
        self.items = [Item(**json.loads(line)) for line in listing.read_text(encoding="utf-8").splitlines()]
        numbers = np.memmap(array, dtype="<f2", mode="r")
        num_frames = sum(item.num_frames for item in self.items)
        if num_frames and len(numbers) % num_frames == 0:
            self._frames = numbers.reshape(num_frames, -1)
        else:
            raise UserError(f"{listing} and {array} do not belong together: run examples/asr/prepare.py again")

    @property
    def num_mels(self) -> int:
        """Size of a feature vector."""
        return int(self._frames.shape[1])

    def features(self, item: Item) -> NDArray[np.float32]:
        """A copy of the item's frames, [num_frames, num_mels]."""
        return self._frames[item.first_frame : item.first_frame + item.num_frames].astype(np.float32)


def write_split(
    folder: Path, split: str, utterances: Iterable[tuple[Utterance, NDArray[np.float16]]]
) -> tuple[int, int]:
    """Write both files of a split, an utterance after the other; returns the number of utterances and of frames.

    The array gets its name last: where it is, the split is whole.
    """
    first = count = 0
    with (
        (folder / f"{split}.f16.part").open("wb") as array,
        (folder / f"{split}.list").open("w", encoding="utf-8") as listing,
    ):
        for utterance, features in utterances:
            array.write(features.astype("<f2").tobytes())
            item = Item(utterance.name, utterance.speaker, utterance.text, first, len(features))
            listing.write(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n")
            first, count = first + len(features), count + 1
    (folder / f"{split}.f16.part").replace(folder / f"{split}.f16")
    return count, first
