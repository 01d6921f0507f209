"""ResNets on CIFAR-10, or on synthetic images."""

from __future__ import annotations

from collections.abc import Sequence

import cifar10
import torch
from cifar10 import Batch
from resnet_models import ARCHITECTURES, ResNet
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import hvdtrain
from hvdtrain.errors import UserError


class Resnet:
    """The task.

    Args:
        arch: resnet18 | resnet34 | resnet50 | resnet101 | resnet152.
        data: folder with CIFAR-10's binary files, or with cifar-10-batches-bin.
        synthetic_samples: no files are read: an epoch has so many random images per rank.
        image_size: height and width of the synthetic images, a multiple of 8.
        augment: shift and mirror the images that are trained on.
    """

    def __init__(
        self,
        arch: str = "resnet18",
        data: str = "data",
        synthetic_samples: int | None = None,
        image_size: int = 32,
        augment: bool = True,
    ) -> None:
        if arch not in ARCHITECTURES:
            raise UserError(f"task_options.arch: {arch!r} is none of {', '.join(ARCHITECTURES)}")
        if image_size < 8 or image_size % 8:
            raise UserError(f"task_options.image_size: {image_size} is not a multiple of 8")
        self.arch, self.synthetic_samples, self.image_size, self.augment = arch, synthetic_samples, image_size, augment
        self.folder = None if synthetic_samples is not None else cifar10.find_folder(data)

    def model(self) -> nn.Module:
        return ResNet(self.arch, cifar10.NUM_CLASSES)

    def train_dataset(self) -> Dataset[Batch]:
        if self.folder is not None:
            return cifar10.Images(*cifar10.read_train(self.folder), augment=self.augment)
        assert self.synthetic_samples is not None
        world = hvdtrain.world()
        return cifar10.SyntheticImages(self.synthetic_samples * world.size, self.image_size, seed=world.rank)

    def eval_dataset(self) -> Dataset[Batch] | None:
        return None if self.folder is None else cifar10.Images(*cifar10.read_test(self.folder), augment=False)

    def collate(self, samples: Batch | Sequence[Batch]) -> Batch:
        # The data sets hand out whole microbatches; a loader that asks for single samples gets them stacked.
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
