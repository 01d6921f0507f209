"""The same work as `hvd_script.py`, as a person writes it for torch's own DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.bench.hvd_work import LEARNING_RATE, REDUCTIONS, arguments, make_training
from hvdtrain.bench.turns import take_turns


def main() -> None:
    """Train, or reduce, in turns with the other contestants."""
    options = arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if options.work in REDUCTIONS:
        tensor = torch.zeros(REDUCTIONS[options.work])
        take_turns(lambda: dist.all_reduce(tensor), dist.get_rank())
    else:
        training = make_training(options.work)
        model = DistributedDataParallel(training.model)
        if options.compression == "fp16":
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        take_turns(training.stepper(model, optimizer), dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
