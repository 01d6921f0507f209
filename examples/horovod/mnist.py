"""MNIST the Horovod way: nothing in this file knows hvdtrain.

horovodrun -np 2 hvdtrain exec examples/horovod/mnist.py              on native torch.distributed
horovodrun -np 2 python examples/horovod/mnist.py                     on the real Horovod
"""

import argparse
import gzip
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def read(folder: Path, name: str) -> torch.Tensor:
    """One IDX file: a header of four bytes, one length per dimension, then the bytes themselves."""
    data = bytearray(gzip.decompress((folder / f"{name}.gz").read_bytes()))
    dimensions = data[3]
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    return torch.frombuffer(data, dtype=torch.uint8, offset=4 + 4 * dimensions).reshape(shape)


def mean_over_ranks(value: float, name: str) -> float:
    """The mean of a number over all ranks."""
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()


def main() -> None:
    """Train, and evaluate after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "mnist" / "data")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    images = read(args.data, "t10k-images-idx3-ubyte").float().div_(255).unsqueeze(1)
    labels = read(args.data, "t10k-labels-idx1-ubyte").long()
    held_out = torch.arange(len(labels)) % 5 == 4
    train, test = TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), seed=args.seed)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
    test_loader = DataLoader(test, batch_size=500, sampler=test_sampler)

    model = nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    # Adasum adapts by itself; averaging over more ranks is like a larger batch.
    lr = args.lr if args.use_adasum else args.lr * hvd.size()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch, target in train_loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
        model.eval()
        total_loss, right = 0.0, 0
        with torch.no_grad():
            for batch, target in test_loader:
                output = model(batch)
                total_loss += functional.cross_entropy(output, target, reduction="sum").item()
                right += int((output.argmax(1) == target).sum())
        mean_loss = mean_over_ranks(total_loss / len(test_sampler), "test_loss")
        accuracy = mean_over_ranks(right / len(test_sampler), "test_accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: test loss {mean_loss:.6f}, accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
