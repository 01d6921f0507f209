"""Evaluation that counts each sample exactly once, whatever the number of ranks: no padding, no means of means."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from hvdtrain.backends import Backend, Replica
from hvdtrain.config import Config
from hvdtrain.data.device import to_device
from hvdtrain.data.loader import EpochSampler, map_loader, stream_loader
from hvdtrain.data.order import derived_seed
from hvdtrain.data.seeding import SeededStream, own_random_numbers
from hvdtrain.errors import ContractError, UserError
from hvdtrain.precision import Precision
from hvdtrain.trainer.losses import unpack

# Keeps the seed of evaluations apart from those of epochs, which count from 0.
_EVALUATION = -1


class Evaluation:
    """The task's `metrics` (or else its mean loss) over its `eval_dataset`, on the bare model.

    A map dataset is dealt to the ranks (sample i to rank i mod size); an iterable one yields this rank's own samples.
    """

    def __init__(self, task: Any, config: Config, backend: Backend) -> None:
        self._task, self._backend = task, backend
        self._seed = derived_seed(config.seed, backend.world.rank, _EVALUATION)
        self._loader: Any = None
        self._num_samples = 0
        self._metrics = task.metrics if callable(getattr(task, "metrics", None)) else self._mean_loss
        dataset = task.eval_dataset() if callable(getattr(task, "eval_dataset", None)) else None
        if dataset is None:
            return
        world, pin_memory = backend.world, backend.device.type == "cuda"
        collate = getattr(task, "collate", None)
        if not isinstance(dataset, IterableDataset) and not (
            hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        ):
            raise UserError(
                f"eval_dataset() returned a {type(dataset).__name__}: it needs __len__ and __getitem__, or to be a "
                f"torch.utils.data.IterableDataset; None for no evaluation"
            )
        if isinstance(dataset, IterableDataset):
            stream = SeededStream(dataset, config.seed, world.rank)
            self._loader = stream_loader(
                stream,
                batch_size=config.batch_size,
                collate=collate,
                num_workers=config.num_workers,
                pin_memory=pin_memory,
            )
            return
        sampler = EpochSampler(
            len(dataset),
            rank=world.rank,
            size=world.size,
            batch_size=config.batch_size or 1,
            shuffle=False,
            seed=config.seed,
        )
        self._loader = map_loader(
            dataset, sampler, seed=config.seed, rank=world.rank, collate=collate, finished=config.batch_size is None,
            num_workers=config.num_workers, pin_memory=pin_memory,
        )  # fmt: skip

    @property
    def is_possible(self) -> bool:
        """Whether the task has something to evaluate on."""
        return self._loader is not None

    def run(self, replica: Replica, precision: Precision) -> dict[str, float]:
        """Evaluate. Collective: every rank gets the same metrics.

        Returns:
            {name: total / count} over all samples of all ranks.

        Raises:
            ContractError: the ranks' metrics have different names, or a count is zero everywhere.
        """
        replica.sync_buffers()
        model = replica.bare_model
        was_training = model.training
        model.eval()
        # Totals and counts apart, each on the device where the task has it: nothing is read until the end.
        totals: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        try:
            # Whatever is drawn here leaves the random numbers of training alone, and is the same in every evaluation.
            with torch.no_grad(), own_random_numbers(self._seed, self._backend.device):
                for batch, num_samples in self._loader:
                    self._num_samples = num_samples
                    with precision.autocast():
                        found = self._metrics(model, to_device(batch, self._backend.device))
                    for name, (total, count) in _pairs(found).items():
                        totals[name] = totals[name] + total if name in totals else total
                        counts[name] = counts[name] + count if name in counts else count
        finally:
            model.train(was_training)
        return self._reduce({name: (totals[name].item(), counts[name].item()) for name in totals})

    def _mean_loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[torch.Tensor, float]]:
        """What is evaluated where the task has no metrics()."""
        loss, weight, _, _ = unpack(self._task.loss(model, batch), self._num_samples)
        return {"loss": (loss * weight, weight)}

    def _reduce(self, sums: dict[str, tuple[float, float]]) -> dict[str, float]:
        names = self._backend.all_gather_object(sorted(sums))
        known = next((found for found in names if found), [])
        for rank, found in enumerate(names):
            if found and found != known:
                raise ContractError(
                    f"metrics() gave {found} on rank {rank} and {known} on another; use the same names everywhere"
                )
        if not known:
            raise ContractError("metrics() returned nothing on any rank: is eval_dataset() empty?")
        table = [sums.get(name, (0.0, 0.0)) for name in known]
        reduced = self._backend.all_reduce(torch.tensor(table, dtype=torch.float64))
        return {name: _ratio(name, *reduced[row].tolist()) for row, name in enumerate(known)}


def _ratio(name: str, total: float, count: float) -> float:
    if count == 0:
        raise ContractError(
            f"metrics(): the count of {name!r} is 0 over all ranks; return (total, count) with a positive count"
        )
    return total / count


def _pairs(found: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """{name: (total, count)} of what the task returned for one batch, as 0-d float64 tensors where they were."""
    try:
        return {name: _counted(_scalar(total), _scalar(count)) for name, (total, count) in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ContractError(
            f"metrics() returned {_shortened(found)} ({error}); return {{name: (total, count)}} with numbers or "
            f"tensors of one element, for example {{'accuracy': (correct, len(labels))}}"
        ) from None


def _counted(total: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair, with 0 for a total that is not finite where nothing was counted (the mean over no token, times 0)."""
    # What is on the CPU is read first, so that the other one is read in the rare case alone.
    if count.device.type == "cpu":
        is_nothing = count.item() == 0 and not math.isfinite(total.item())
    elif total.device.type == "cpu":
        is_nothing = not math.isfinite(total.item()) and count.item() == 0
    else:
        return total.masked_fill((count == 0) & ~torch.isfinite(total), 0.0), count
    return torch.zeros_like(total) if is_nothing else total, count


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _scalar(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().to(torch.float64).reshape(())
