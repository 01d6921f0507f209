"""All-reduce on a ring: every rank sends to the right and receives from the left, one chunk at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_reduce(tensor: torch.Tensor) -> None:
    """Replace `tensor` (contiguous) on every rank by the sum over all ranks. Collective.

    The tensor is cut into as many chunks as there are ranks. In the first round each chunk travels once around and
    collects everybody's addend; after N - 1 steps rank r holds the finished chunk r + 1. In the second round the
    finished chunks travel around once more. All links are busy all the time, and each carries 2 (N - 1) / N of the
    tensor: hardly more for many ranks than for few.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(size)
    addend = torch.empty_like(chunks[0])  # the first chunk is the largest
    for step in range(size - 1):  # scatter-reduce
        outgoing, own = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming = addend[: len(own)]
        _pass_on(outgoing, incoming)
        own += incoming
    for step in range(size - 1):  # all-gather
        _pass_on(chunks[(rank - step + 1) % size], chunks[(rank - step) % size])


def _pass_on(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send to the right while receiving from the left; a chunk without elements stays at home."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(outgoing, (rank + 1) % size) if len(outgoing) else None
    if len(incoming):
        dist.recv(incoming, (rank - 1) % size)
    if sending is not None:
        sending.wait()


def sent_bytes(size: int, num_bytes: int) -> list[float]:
    """What each rank sends, of a tensor of `num_bytes` that divides evenly; each receives as much."""
    return [num_bytes * 2.0 * (size - 1) / size] * size
