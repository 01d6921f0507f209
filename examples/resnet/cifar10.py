"""CIFAR-10 from its binary files, and synthetic images in its place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from hvdtrain.errors import UserError

Batch = tuple[Tensor, Tensor]  # images [N, 3, H, W] float32, labels [N] int64

NUM_CLASSES = 10
_SIZE = 32
_RECORD_BYTES = 1 + 3 * _SIZE * _SIZE
# Mean and standard deviation of the training images' red, green and blue, of pixels from 0 to 1.
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(1, 3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(1, 3, 1, 1)
_PADDING = 4


class Images(Dataset[Batch]):
    """Images in memory, handed out as whole microbatches.

    Args:
        images: uint8 [N, 3, 32, 32].
        labels: int64 [N].
        augment: shift by up to 4 pixels each way and mirror half of them, at random.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices)
        images = (self.images[chosen] / 255 - _MEAN) / _DEVIATION
        return shifted_and_mirrored(images) if self.augment else images, self.labels[chosen]


def shifted_and_mirrored(images: Tensor) -> Tensor:
    """Each image [N, C, H, W] moved by -4 to 4 pixels, zeros coming in, and mirrored with probability 1/2."""
    num_images, _, height, width = images.shape
    padded = functional.pad(images, [_PADDING] * 4)
    corners = torch.randint(2 * _PADDING + 1, (2, num_images, 1))
    rows, columns = corners[0] + torch.arange(height), corners[1] + torch.arange(width)
    mirrored = torch.rand(num_images, 1) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(num_images).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


class SyntheticImages(Dataset[Batch]):
    """One random microbatch, again and again: nothing is read, so that the training alone is measured.

    Args:
        num_samples: length of the data set.
        size: height and width of an image.
        seed: of the pixels and labels; each rank has its own.
    """

    def __init__(self, num_samples: int, size: int, seed: int) -> None:
        self.num_samples, self.size, self.seed = num_samples, size, seed
        self._made: Batch | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Batch:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        wanted = len(indices)
        if self._made is None or len(self._made[1]) < wanted:
            generator = torch.Generator().manual_seed(self.seed)
            self._made = (
                torch.randn(wanted, 3, self.size, self.size, generator=generator),
                torch.randint(NUM_CLASSES, (wanted,), generator=generator),
            )
        return self._made[0][:wanted], self._made[1][:wanted]


def read_train(folder: Path) -> Batch:
    """The images uint8 [N, 3, 32, 32] and labels of all `data_batch_*.bin`: 50,000 in the original."""
    parts = [_read(path) for path in sorted(folder.glob("data_batch_*.bin"))]
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def read_test(folder: Path) -> Batch:
    """Likewise of `test_batch.bin`: 10,000 in the original."""
    return _read(folder / "test_batch.bin")


def find_folder(data: str) -> Path:
    """The folder with the binary files: `data`, or `cifar-10-batches-bin` in it.

    A relative path that the working directory lacks is looked for above this file.

    Raises:
        UserError: there are no such files; says how to get them.
    """
    here = Path(__file__).resolve().parent
    for folder in (Path(data).expanduser(), *(above / data for above in (here, *here.parents))):
        for place in (folder, folder / "cifar-10-batches-bin"):
            if any(place.glob("data_batch_*.bin")) and (place / "test_batch.bin").is_file():
                return place
    raise UserError(
        f"no CIFAR-10 in {data!r}: neither that folder nor cifar-10-batches-bin in it holds data_batch_*.bin and "
        f"test_batch.bin (the working directory is {Path.cwd()}). Get the binary version (cifar-10-binary.tar.gz, "
        f"162 MB) from https://www.cs.toronto.edu/~kriz/cifar.html, unpack it there on every host, or train on "
        f"synthetic images: main.py --use_syn, or `hvdtrain train examples/resnet/synthetic.yaml`"
    )


def _read(path: Path) -> Batch:
    """A file of records: one byte of label, then 1024 bytes each of red, green and blue, row by row.

    The format is described at https://www.cs.toronto.edu/~kriz/cifar.html.
    """
    content = np.fromfile(path, dtype=np.uint8)
    if len(content) == 0 or len(content) % _RECORD_BYTES:
        raise UserError(
            f"{path}: {len(content)} bytes are no whole number of CIFAR-10's records of {_RECORD_BYTES} bytes; is it "
            f"the binary version, and complete? The original has 30730000 bytes"
        )
    records = torch.from_numpy(content).view(-1, _RECORD_BYTES)
    labels = records[:, 0].long()
    if int(labels.max()) >= NUM_CLASSES:
        raise UserError(f"{path}: has the label {int(labels.max())}, and CIFAR-10 has 0 to 9; is it another data set?")
    return records[:, 1:].reshape(-1, 3, _SIZE, _SIZE), labels
