"""One rank of one contestant of peers.py: the same model, data and optimizer in the loop that its library asks for.

    python peer_loops.py CONTESTANT small|large

Each loop is written as the library's own introduction writes it. All start from the same data set in memory and torch's
DataLoader; libraries that wrap the loader do so. Ranks come from RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvdtrain.bench import overhead_loops
from hvdtrain.bench.turns import turns
from hvdtrain.bench.workloads import MLPS, Mlp, as_is

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Work:
    """What all contestants train.

    Attributes:
        task: makes the model, the data set and the loss.
        batch_size: samples of one rank in a step.
    """

    def __init__(self, model: str) -> None:
        self.widths, self.batch_size = MLPS[model]
        self.name, self.task = model, Mlp(self.widths)

    def model_and_optimizer(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The same on every rank."""
        torch.manual_seed(1)
        model = self.task.model()
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loader(self, sampler: Any = None) -> DataLoader[Any]:
        """Over the whole data set, or over the sampler's part of it."""
        shuffle = None if sampler is not None else True
        return DataLoader(
            self.task.train_dataset(), self.batch_size, shuffle=shuffle, sampler=sampler, collate_fn=as_is
        )


def forever(loader: Any, set_epoch: Callable[[int], None]) -> Iterator[Any]:
    """Batch after batch, epoch after epoch."""
    epoch = 0
    while True:
        set_epoch(epoch)
        yield from loader
        epoch += 1


def accelerate(work: Work) -> None:
    """Accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = work.model_and_optimizer()
    model, optimizer, loader = accelerator.prepare(model, optimizer, work.loader())
    assert isinstance(model, DistributedDataParallel), type(model)
    assert dist.get_backend() == "gloo"
    batches = forever(loader, loader.set_epoch)
    for _ in turns(accelerator.process_index):
        batch = next(batches)
        optimizer.zero_grad()
        accelerator.backward(work.task.loss(model, batch))
        optimizer.step()


def fabric(work: Work) -> None:
    """Lightning Fabric's quick start."""
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=SIZE, strategy="ddp")
    made.launch()
    model, optimizer = work.model_and_optimizer()
    model, optimizer = made.setup(model, optimizer)
    loader: Any = made.setup_dataloaders(work.loader())
    assert isinstance(loader.sampler, DistributedSampler)
    assert dist.get_backend() == "gloo"
    batches = forever(loader, loader.sampler.set_epoch)
    for _ in turns(made.global_rank):
        batch = next(batches)
        optimizer.zero_grad()
        made.backward(work.task.loss(model, batch))
        optimizer.step()


def ignite(work: Work) -> None:
    """Ignite's engine with its idist helpers."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events

    with idist.Parallel(backend="gloo") as parallel:

        def training(local_rank: int) -> None:
            model, optimizer = work.model_and_optimizer()
            model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)
            assert isinstance(model, DistributedDataParallel)
            # It divides the batch size by the number of ranks.
            total = work.batch_size * idist.get_world_size()
            loader = idist.auto_dataloader(
                work.task.train_dataset(), batch_size=total, shuffle=True, collate_fn=as_is, pin_memory=False
            )

            def update(engine: Engine, batch: Any) -> None:
                model.train()
                optimizer.zero_grad()
                work.task.loss(model, batch).backward()
                optimizer.step()

            engine, mine = Engine(update), turns(idist.get_rank())

            @engine.on(Events.EPOCH_STARTED)
            def new_order(engine: Engine) -> None:
                loader.sampler.set_epoch(engine.state.epoch)

            @engine.on(Events.ITERATION_COMPLETED)
            def next_turn(engine: Engine) -> None:
                if next(mine, "no more") == "no more":
                    engine.terminate()

            # The generator yields before each step, and the engine asks after each step.
            next(mine)
            engine.run(loader, max_epochs=10**6)

        parallel.run(training)


# name: (what it is, base of its ratio, loop)
CONTESTANTS: dict[str, tuple[str, str | None, Callable[[Work], None]]] = {
    "raw-ddp": ("DDP by hand", None, lambda work: overhead_loops.ddp_by_hand(work.name)),
    "raw-ddp-again": ("DDP by hand, again", "raw-ddp", lambda work: overhead_loops.ddp_by_hand(work.name)),
    "hvdtrain-ddp": ("hvdtrain, ddp", "raw-ddp", lambda work: overhead_loops.trainer("ddp", work.name)),
    "accelerate": ("Accelerate", "raw-ddp", accelerate),
    "fabric": ("Lightning Fabric", "raw-ddp", fabric),
    "ignite": ("Ignite", "raw-ddp", ignite),
    "raw-horovod": ("Horovod by hand", None, lambda work: overhead_loops.horovod_by_hand(work.name)),
    "raw-horovod-again": (
        "Horovod by hand, again",
        "raw-horovod",
        lambda work: overhead_loops.horovod_by_hand(work.name),
    ),
    "hvdtrain-horovod": ("hvdtrain, horovod", "raw-horovod", lambda work: overhead_loops.trainer("horovod", work.name)),
}


def main() -> None:
    """See the module."""
    name, model = sys.argv[1:3]
    torch.set_num_threads(1)
    logging.getLogger("hvdtrain").setLevel(logging.WARNING)
    CONTESTANTS[name][2](Work(model))


if __name__ == "__main__":
    main()
