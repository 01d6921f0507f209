"""Two ways to add a tensor over all ranks, beside torch.distributed's own all-reduce: the sums, the time, the bytes.

    torchrun --standalone --nproc_per_node=4 examples/collectives/main.py

Any launcher will do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import hvdtrain
from hvdtrain.backends import Backend
from hvdtrain.errors import HvdtrainError, TrainingFailed
from hvdtrain.launch import ManualFlags

sys.path.insert(0, str(Path(__file__).resolve().parent))
import parameter_server
import ring


def timed(backend: Backend, all_reduce: Callable[[torch.Tensor], None], numel: int) -> float:
    """Add 0 + rank, 1 + rank, 2 + rank, ... over the ranks and compare with the sum. Collective. Returns seconds.

    Raises:
        TrainingFailed: another sum came out.
    """
    world = backend.world
    numbers = torch.arange(numel, dtype=torch.float32) % 1024  # small enough for exact sums
    tensor = numbers + world.rank
    backend.barrier()
    start_s = time.perf_counter()
    with backend.guard.operation("all-reduce"):
        all_reduce(tensor)
    elapsed_s = time.perf_counter() - start_s
    if not torch.equal(tensor, numbers * world.size + sum(range(world.size))):
        raise TrainingFailed(f"rank {world.rank} got another sum")
    return float(backend.all_reduce(torch.tensor(elapsed_s), "max"))


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=16.0, help="of the tensor, MB (default: 16)")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="what torch.distributed.launch passes")
    chosen = parser.parse_args()
    flags = ManualFlags(local_rank=chosen.local_rank) if chosen.local_rank is not None else None
    with hvdtrain.connect("ddp", transport="gloo", device="cpu", flags=flags) as backend:
        size = backend.world.size
        numel = max(1, int(chosen.size * 1e6 / 4))
        ways: dict[str, tuple[Callable[[torch.Tensor], None], list[float] | None]] = {
            "parameter server": (parameter_server.all_reduce, parameter_server.sent_bytes(size, numel * 4)),
            "ring": (ring.all_reduce, ring.sent_bytes(size, numel * 4)),
            "torch.distributed": (lambda tensor: dist.all_reduce(tensor), None),
        }
        if backend.world.is_root:
            print(f"{size} ranks, {numel * 4 / 1e6:.1f} MB")
        for name, (all_reduce, sent) in ways.items():
            timed(backend, all_reduce, numel)  # connections are made at their first use
            best_s = min(timed(backend, all_reduce, numel) for _ in range(3))
            if backend.world.is_root:
                said = (
                    ""
                    if sent is None
                    else f", sent by rank 0 {sent[0] / 1e6:.1f} MB, by the last {sent[-1] / 1e6:.1f} MB"
                )
                print(f"{name}: right, {best_s * 1000:.1f} ms{said}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
