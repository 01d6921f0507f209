"""Evaluation that counts each sample exactly once, whatever the number of ranks: no padding, no means of means."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import IterableDataset

from hvdtrain.backends import Backend, Replica
from hvdtrain.config import Config
from hvdtrain.data.device import to_device
from hvdtrain.data.loader import EpochSampler, map_loader, stream_loader
from hvdtrain.data.seeding import SeededStream
from hvdtrain.errors import ContractError
from hvdtrain.precision import Precision


class Evaluation:
    """The task's `metrics` over its `eval_dataset`, on the bare model.

    A map dataset is dealt to the ranks (sample i to rank i mod size); an iterable one yields this rank's own samples.
    """

    def __init__(self, task: Any, config: Config, backend: Backend) -> None:
        self._task, self._backend = task, backend
        self._loader: Any = None
        dataset = task.eval_dataset() if callable(getattr(task, "eval_dataset", None)) else None
        if dataset is None:
            return
        world, pin_memory = backend.world, backend.device.type == "cuda"
        collate = getattr(task, "collate", None)
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
        sums: dict[str, torch.Tensor] = {}
        try:
            with torch.no_grad():
                for batch, _ in self._loader:
                    with precision.autocast():
                        found = self._task.metrics(model, to_device(batch, self._backend.device))
                    for name, (total, count) in found.items():
                        pair = torch.stack([_scalar(total), _scalar(count)])
                        sums[name] = sums[name] + pair if name in sums else pair
        finally:
            model.train(was_training)
        return self._reduce(sums)

    def _reduce(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        names = self._backend.all_gather_object(sorted(sums))
        known = next((found for found in names if found), [])
        for rank, found in enumerate(names):
            if found and found != known:
                raise ContractError(
                    f"metrics() gave {found} on rank {rank} and {known} on another; use the same names everywhere"
                )
        if not known:
            raise ContractError("metrics() returned nothing on any rank: is eval_dataset() empty?")
        zero = torch.zeros(2, dtype=torch.float64)
        table = torch.stack([sums.get(name, zero).cpu() for name in known])
        reduced = self._backend.all_reduce(table)
        return {name: _ratio(name, *reduced[row].tolist()) for row, name in enumerate(known)}


def _ratio(name: str, total: float, count: float) -> float:
    if count == 0:
        raise ContractError(
            f"metrics(): the count of {name!r} is 0 over all ranks; return (total, count) with a positive count"
        )
    return total / count


def _scalar(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().to(torch.float64).reshape(())
