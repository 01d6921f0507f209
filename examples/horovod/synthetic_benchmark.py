"""Images per second on made-up images, as Horovod's users measure it. Nothing in this file knows hvdtrain.

horovodrun -np 2 hvdtrain exec examples/horovod/synthetic_benchmark.py      on native torch.distributed
horovodrun -np 2 python examples/horovod/synthetic_benchmark.py             on the real Horovod
"""

import argparse
import itertools
import timeit

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, channels, H, W]."""
        return functional.relu(x + self.body(x))


def make_model(name: str) -> tuple[nn.Module, list[int]]:
    """A model with 10 outputs, and the shape of one of its inputs."""
    if name == "mlp":
        widths = [784, 2048, 2048, 2048]
        layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(2048, 10)), [784]
    stages = [
        m for a, b in ((16, 32), (32, 64)) for m in (nn.Conv2d(a, b, 3, stride=2, padding=1), Residual(b), Residual(b))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Residual(16), *stages, *head), [3, 32, 32]


def main() -> None:
    """Measure, and print the mean and 1.96 standard deviations."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["resnet", "mlp"], default="resnet")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--num-warmup-batches", type=int, default=5)
    parser.add_argument("--num-batches-per-iter", type=int, default=5)
    parser.add_argument("--num-iters", type=int, default=5)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(0)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    model, shape = make_model(args.model)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if args.use_adasum else 0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = torch.randn(args.batch_size, *shape, device=device)
    target = torch.randint(0, 10, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(data), target).backward()
        optimizer.step()

    def show(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    show(f"Model: {args.model}, batch size {args.batch_size}, {hvd.size()} ranks on {device.type}")
    timeit.timeit(step, number=args.num_warmup_batches)
    rates = []
    for index in range(args.num_iters):
        seconds = timeit.timeit(step, number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        show(f"Iter #{index}: {rates[-1]:.1f} img/sec per rank")
    measured = torch.tensor(rates)
    mean, spread = measured.mean().item(), 1.96 * measured.std().item() if len(rates) > 1 else 0.0
    show(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    show(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
