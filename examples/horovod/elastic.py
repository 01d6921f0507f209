"""Elastic training the Horovod way: a lost rank costs what came after the last commit. This file knows no hvdtrain.

torchrun --nnodes 1 --nproc-per-node 2 --max-restarts 3 -m hvdtrain exec examples/horovod/elastic.py
horovodrun -np 2 --min-np 1 --host-discovery-script ./hosts.sh python examples/horovod/elastic.py    real Horovod
"""

import argparse
import os
import signal
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn


def main() -> None:
    """Fit y = 3x - 1 on samples that an ElasticSampler shares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batches-per-commit", type=int, default=2)
    parser.add_argument("--kill-once", type=Path, help="rank 1 kills itself in epoch 2, unless this file exists")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = torch.utils.data.TensorDataset(x, 3 * x - 1)
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> float:
        loss = torch.zeros(())
        if hvd.rank() == 0:
            print(f"begins at epoch {state.epoch}, batch {state.batch}, with {hvd.size()} ranks", flush=True)
        while state.epoch < args.epochs:
            loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=state.sampler)
            for inputs, target in loader:
                if args.kill_once and state.epoch == 2 and hvd.rank() == 1 and not args.kill_once.exists():
                    args.kill_once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), target)
                loss.backward()
                optimizer.step()
                state.sampler.record_batch(state.batch, len(inputs))
                state.batch += 1
                if state.batch % args.batches_per_commit == 0:
                    state.commit()
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()
        return loss.item()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    final = train(state)
    if hvd.rank() == 0:
        print(f"done: epoch {state.epoch}, loss {final:.6f}, weight {model.weight.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
