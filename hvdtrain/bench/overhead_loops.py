"""One rank of one contestant of `hvdtrain bench overhead`: the trainer, or the loop that a person writes in its place.

    python -m hvdtrain.bench.overhead_loops trainer-ddp|trainer-horovod|by-hand-ddp|by-hand-horovod small|large

The loops by hand are those of the tutorials of DDP and of Horovod; they use nothing of ours but the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from hvdtrain.backends import make_backend
from hvdtrain.backends.horovod import import_horovod
from hvdtrain.bench.turns import turns
from hvdtrain.bench.workloads import MLPS, Mlp, as_is
from hvdtrain.config import Config
from hvdtrain.trainer.run import Job, connect_options

_LR, _MOMENTUM = 0.01, 0.9
# A rank is held while others are on turn, and must not be taken for lost.
_SILENT_LIMIT_S = 3600.0


def trainer(backend: str, model: str) -> None:
    """As `hvdtrain train` runs it."""
    widths, batch_size = MLPS[model]
    with tempfile.TemporaryDirectory() as output, contextlib.ExitStack() as stack:
        config = Config(
            task="hvdtrain.bench.workloads:Mlp",
            task_options={"widths": widths},
            backend=backend,  # type: ignore[arg-type]
            device="cpu",
            transport="gloo",
            epochs=None,
            max_steps=10**9,
            batch_size=batch_size,
            optimizer={"name": "SGD", "lr": _LR, "momentum": _MOMENTUM},  # type: ignore[arg-type]
            checkpoint={"every_steps": None},  # type: ignore[arg-type]
            output=output,
        )
        options = dataclasses.replace(connect_options(config), silent_limit_s=_SILENT_LIMIT_S)
        connected = stack.enter_context(make_backend(backend, options))
        steps = Job(config, connected).prepare("none", stack).session.steps()
        for _ in turns(connected.world.rank):
            next(steps)


def ddp_by_hand(model: str) -> None:
    """torch's tutorial of DistributedDataParallel."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    task, batches = _task_and_batches(model, rank, size)
    ddp = DistributedDataParallel(task.model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=_LR, momentum=_MOMENTUM)
    for _ in turns(rank):
        batch = next(batches)
        optimizer.zero_grad()
        loss: Any = task.loss(ddp, batch)
        loss.backward()
        optimizer.step()


def horovod_by_hand(model: str) -> None:
    """Horovod's introduction for PyTorch."""
    hvd: Any = import_horovod()
    hvd.init()
    task, batches = _task_and_batches(model, hvd.rank(), hvd.size())
    net = task.model()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=_LR, momentum=_MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for _ in turns(hvd.rank()):
        batch = next(batches)
        optimizer.zero_grad()
        loss: Any = task.loss(net, batch)
        loss.backward()
        optimizer.step()


def _task_and_batches(model: str, rank: int, size: int) -> tuple[Mlp, Iterator[Any]]:
    widths, batch_size = MLPS[model]
    torch.manual_seed(1)
    task = Mlp(widths)
    sampler: Any = DistributedSampler(task.train_dataset(), size, rank)
    collate: Any = as_is
    loader = DataLoader(task.train_dataset(), batch_size=batch_size, sampler=sampler, collate_fn=collate)
    return task, _forever(loader, sampler)


def _forever(loader: DataLoader[Any], sampler: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    """See the module."""
    name, model = sys.argv[1:3]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    logging.getLogger("hvdtrain").setLevel(logging.WARNING)
    loops = {"by-hand-ddp": ddp_by_hand, "by-hand-horovod": horovod_by_hand}
    if name in loops:
        loops[name](model)
    else:
        trainer(name.removeprefix("trainer-"), model)


if __name__ == "__main__":
    main()
