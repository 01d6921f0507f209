"""All-reduce by a parameter server: everybody sends to one rank, which adds and sends the sum back."""

from __future__ import annotations

import torch
import torch.distributed as dist

SERVER = 0


def all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` on every rank by the sum over all ranks. Collective.

    A worker sends the tensor once and receives it once. The server receives it N - 1 times and sends it N - 1 times:
    its link is what the others wait for, and the more ranks there are, the longer.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != SERVER:
        dist.send(tensor, SERVER)
        dist.recv(tensor, SERVER)
        return
    workers = [other for other in range(size) if other != SERVER]
    theirs = torch.empty_like(tensor)
    for worker in workers:  # gather
        dist.recv(theirs, worker)
        tensor += theirs
    for worker in workers:  # broadcast
        dist.send(tensor, worker)


def sent_bytes(size: int, num_bytes: int) -> list[float]:
    """What each rank sends, of a tensor of `num_bytes`; each receives as much."""
    return [num_bytes * (size - 1.0) if rank == SERVER else float(num_bytes) for rank in range(size)]
