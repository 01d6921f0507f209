"""Training loops as a person writes them by hand from the tutorials of DDP and of Horovod: what the trainer is
compared with. They use what a started backend has initialised, and nothing else of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvdtrain.backends import Backend
from hvdtrain.backends.horovod import import_horovod
from hvdtrain.bench.workloads import Mlp, as_is


class RawLoop:
    """The loop itself; subclasses set up model and optimizer."""

    model: Any
    optimizer: Any

    def __init__(self, task: Mlp, batch_size: int, backend: Backend) -> None:
        dataset = task.train_dataset()
        sampler: Any = DistributedSampler(dataset, backend.world.size, backend.world.rank)
        collate: Any = as_is
        self._loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate)
        self._task = task
        self._batches = self._forever(sampler)

    def _forever(self, sampler: Any) -> Iterator[Any]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from self._loader
            epoch += 1

    def run(self, num_steps: int) -> None:
        """Take that many steps. Collective."""
        for _ in range(num_steps):
            batch = next(self._batches)
            self.optimizer.zero_grad()
            loss: Any = self._task.loss(self.model, batch)
            loss.backward()
            self.optimizer.step()


class RawDdp(RawLoop):
    """DistributedDataParallel with its defaults."""

    def __init__(self, task: Mlp, batch_size: int, backend: Backend) -> None:
        super().__init__(task, batch_size, backend)
        self.model = DistributedDataParallel(task.model())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)


class RawHorovod(RawLoop):
    """Horovod's DistributedOptimizer with its defaults."""

    def __init__(self, task: Mlp, batch_size: int, backend: Backend) -> None:
        super().__init__(task, batch_size, backend)
        hvd: Any = import_horovod()
        self.model = task.model()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())


RAW_LOOPS: dict[str, type[RawDdp] | type[RawHorovod]] = {"ddp": RawDdp, "horovod": RawHorovod}
