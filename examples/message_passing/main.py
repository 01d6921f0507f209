"""Rank 0 sends a tensor to every other rank: the smallest proof that all processes of all hosts reach each other.

    torchrun --standalone --nproc_per_node=2 main.py --backend=gloo

Any launcher will do. hvdtrain finds out who started the process and brings the ranks together; the messages themselves
are torch.distributed's own send and recv.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

import hvdtrain
from hvdtrain.backends import Backend
from hvdtrain.errors import HvdtrainError, TrainingFailed, UserError
from hvdtrain.launch import ManualFlags


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--backend",
        choices=["gloo", "nccl"],
        default="nccl" if torch.cuda.is_available() else "gloo",
        help="what carries the tensor: gloo from CPU memory, nccl from GPU memory (default: nccl where there is a GPU)",
    )
    parser.add_argument("--size", type=int, default=1_000_000, help="float32 numbers to send (default: 1000000)")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="what torch.distributed.launch passes")
    chosen = parser.parse_args(arguments)
    if chosen.size < 1:
        parser.error("--size: at least one number has to be sent")
    return chosen


def send_and_receive(backend: Backend, size: int) -> None:
    """Rank 0 sends 0, 1, 2, ... to each other rank in turn; the others receive and compare. Collective.

    Raises:
        TrainingFailed: something else arrived.
    """
    rank, expected = backend.world.rank, torch.arange(size, dtype=torch.float32, device=backend.device)
    hosts = backend.all_gather_object(backend.host)
    if rank == 0:
        for receiver in range(1, backend.world.size):
            with backend.guard.operation(f"send to rank {receiver}"):
                dist.send(expected, dst=receiver)
            print(f"Rank 0 sent data to Rank {receiver} (host {hosts[receiver]})", flush=True)
        return
    received = torch.zeros_like(expected)
    with backend.guard.operation("receive from rank 0"):
        dist.recv(received, src=0)
    if not torch.equal(received, expected):
        raise TrainingFailed(f"rank {rank} on {hosts[rank]} received other numbers than rank 0 sent")
    print(f"Rank {rank} has received data from rank 0 (host {hosts[0]})", flush=True)


def main() -> None:
    """One rank."""
    chosen = options()
    flags = ManualFlags(local_rank=chosen.local_rank) if chosen.local_rank is not None else None
    device = "auto" if chosen.backend == "nccl" else "cpu"
    with hvdtrain.connect("ddp", transport=chosen.backend, device=device, flags=flags) as backend:
        world = backend.world
        if world.size == 1:
            raise UserError(
                "one rank has nobody to send to; start two or more, for example with torchrun --standalone "
                "--nproc_per_node=2 main.py"
            )
        send_and_receive(backend, chosen.size)
        backend.barrier()
        if world.is_root:
            print(
                f"Done: {world.size} ranks on {world.num_nodes} host(s), started by {backend.launcher}; "
                f"{world.size - 1} message(s) of {4 * chosen.size:,} bytes over {backend.transport}",
                flush=True,
            )


if __name__ == "__main__":
    try:
        main()
    except HvdtrainError as error:
        print(f"main.py: error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
