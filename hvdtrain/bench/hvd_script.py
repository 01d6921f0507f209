"""The Horovod script of `hvdtrain bench hvd`: written for horovod.torch, unaware of which one it gets."""

import horovod.torch as hvd
import torch

from hvdtrain.bench.hvd_work import LEARNING_RATE, REDUCTIONS, arguments, make_training
from hvdtrain.bench.turns import take_turns


def main() -> None:
    """Train, or reduce, in turns with the other contestants."""
    options = arguments()
    hvd.init()
    torch.set_num_threads(1)
    if options.work in REDUCTIONS:
        tensor = torch.zeros(REDUCTIONS[options.work])
        take_turns(lambda: hvd.allreduce_(tensor, name="reduced", op=hvd.Sum), hvd.rank())
        return
    training = make_training(options.work)
    optimizer = torch.optim.SGD(training.model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=training.model.named_parameters(),
        compression=hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none,
    )
    hvd.broadcast_parameters(training.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    take_turns(training.stepper(training.model, optimizer), hvd.rank())


if __name__ == "__main__":
    main()
