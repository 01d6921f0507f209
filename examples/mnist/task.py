"""A small convolutional network on MNIST, read from the original IDX files."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from hvdtrain.errors import UserError

Batch = tuple[Tensor, Tensor]  # images [N, 1, 28, 28] float32 in 0..1, labels [N] int64


class Mnist:
    """The task.

    Args:
        data: folder with the IDX files, gzipped or not. With the `train-*` pair in it: 60,000 images to train on, the
            `t10k-*` pair's 10,000 to evaluate. With the `t10k-*` pair alone: 8,000 and 2,000 of those. Default: the
            folder beside this file. A relative path that the working directory lacks is looked for above this file.
        dropout: share of the hidden units dropped while training.
        batch_norm: normalise after each convolution, with the statistics of the rank's own microbatch.
    """

    def __init__(self, data: str | None = None, dropout: float = 0.0, batch_norm: bool = False) -> None:
        self.dropout, self.batch_norm = dropout, batch_norm
        folder = _find_folder(data)
        test = _read_pair(folder, "t10k")
        if any(folder.glob("train-*")):
            self.train, self.test = _read_pair(folder, "train"), test
        else:
            # The file's first half is easier than its second, so every fifth image is held out, not the last ones.
            held_out = torch.arange(len(test[1])) % 5 == 4
            self.train = (test[0][~held_out], test[1][~held_out])
            self.test = (test[0][held_out], test[1][held_out])

    def model(self) -> nn.Module:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            norm = [nn.BatchNorm2d(outputs)] if self.batch_norm else []
            return [nn.Conv2d(inputs, outputs, kernel_size=5, padding=2), *norm, nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(
            *block(1, 16),
            *block(16, 32),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            *([nn.Dropout(self.dropout)] if self.dropout else []),
            nn.Linear(128, 10),
        )

    def train_dataset(self) -> Dataset[Batch]:
        return Images(*self.train)

    def eval_dataset(self) -> Dataset[Batch]:
        return Images(*self.test)

    def collate(self, samples: Batch | Sequence[Batch]) -> Batch:
        # Images hands out whole microbatches; a loader that asks for single samples gets them stacked.
        if isinstance(samples, tuple):
            return samples
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.stack(labels)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, int]]:
        images, labels = batch
        scores = model(images)
        return {
            "accuracy": ((scores.argmax(dim=1) == labels).sum(), len(labels)),
            "loss": (functional.cross_entropy(scores, labels, reduction="sum"), len(labels)),
        }


class Images(Dataset[Batch]):
    """Images and labels in memory: uint8 [N, 28, 28] and int64 [N]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.images[index].unsqueeze(0) / 255, self.labels[index]

    def __getitems__(self, indices: list[int]) -> Batch:
        """A microbatch in one go; torch's data loader calls this instead of fetching samples one by one."""
        chosen = torch.as_tensor(indices)
        return self.images[chosen].unsqueeze(1) / 255, self.labels[chosen]


def _find_folder(data: str | None) -> Path:
    here = Path(__file__).resolve().parent
    if data is None:
        return here / "data"
    candidates = [Path(data).expanduser(), *(folder / data for folder in (here, *here.parents))]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise UserError(f"task_options.data: no folder {data} in {Path.cwd()}, {here} or the folders above it")


def _read_pair(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    images = _read_idx(folder, f"{part}-images-idx3-ubyte")
    labels = _read_idx(folder, f"{part}-labels-idx1-ubyte")
    if len(images) != len(labels):
        raise UserError(f"{folder}: {len(images)} {part} images but {len(labels)} labels")
    return images, labels.long()


def _read_idx(folder: Path, name: str) -> Tensor:
    """An IDX file of unsigned bytes: 0, 0, 8, number of dimensions, each size as a big-endian uint32, the bytes.

    The format is described at http://yann.lecun.com/exdb/mnist/.
    """
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            break
    else:
        raise UserError(f"{folder} holds no {name}.gz; task_options.data names a folder with the MNIST files")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: damaged: {error}") from error
    num_dimensions = content[3] if content[:3] == b"\0\0\x08" else 0
    header = 4 + 4 * num_dimensions
    shape = tuple(int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4))
    if num_dimensions == 0 or len(content) != header + int(np.prod(shape)):
        raise UserError(f"{path}: not an IDX file of bytes, or cut short")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy())
