"""What prepare.py writes once and every rank reads: features, list of utterances, units, CMVN."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UserError

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
    """A split as it lies on the disk: SPLIT.list (JSON lines) and SPLIT.npy (float16 [frames, num_mels]).

    The array is mapped, not read: the ranks of a host share its pages, and it may be larger than the memory.

    Raises:
        UserError: the files are missing, or do not belong together.
    """

    def __init__(self, folder: Path, split: str) -> None:
        listing, array = folder / f"{split}.list", folder / f"{split}.npy"
        if not listing.is_file() or not array.is_file():
            raise UserError(f"{folder} lacks {split}.list or {split}.npy: run examples/asr/prepare.py first")
        self.items = [Item(**json.loads(line)) for line in listing.read_text(encoding="utf-8").splitlines()]
        self._frames = np.load(array, mmap_mode="r")
        if sum(item.num_frames for item in self.items) != len(self._frames):
            raise UserError(f"{listing} and {array} do not belong together: run examples/asr/prepare.py again")

    @property
    def num_mels(self) -> int:
        """Size of a feature vector."""
        return int(self._frames.shape[1])

    def features(self, item: Item) -> NDArray[np.float32]:
        """A copy of the item's frames, [num_frames, num_mels]."""
        return self._frames[item.first_frame : item.first_frame + item.num_frames].astype(np.float32)


def write_split(folder: Path, split: str, items: list[Item], frames: NDArray[np.float16]) -> None:
    """Write both files of a split."""
    np.save(folder / f"{split}.npy", frames)
    lines = "".join(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n" for item in items)
    (folder / f"{split}.list").write_text(lines, encoding="utf-8")
