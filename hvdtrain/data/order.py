"""The order of a map dataset: a permutation of (seed, epoch), dealt to the ranks like cards.

Position p of the epoch's order belongs to rank p mod size. After any number of whole steps the samples that were used
are a prefix of the order, so one number, the cursor, is all that a resumed run needs, whatever its number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def derived_seed(*parts: int) -> int:
    """A 63-bit seed from several numbers, the same on every machine and in every version.

    FNV-1a over the little-endian 64-bit parts (http://www.isthe.com/chongo/tech/comp/fnv/): Python's own hash of a
    tuple may change between versions.
    """
    value = 0xCBF29CE484222325
    for part in parts:
        for byte in int(part).to_bytes(8, "little", signed=True):
            value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value >> 1


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> Sequence[int] | torch.Tensor:
    """The epoch's order: position -> sample. Depends on (seed, epoch) alone."""
    if not shuffle:
        return range(num_samples)
    generator = torch.Generator()
    generator.manual_seed(derived_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def share(order: Sequence[int] | torch.Tensor, start: int, rank: int, size: int) -> list[int]:
    """The samples of one rank, from position `start` of the order on."""
    part = order[start + rank :: size]
    return part.tolist() if isinstance(part, torch.Tensor) else list(part)


class StepPlan:
    """How many samples each rank has in each step of the rest of an epoch. Every rank works out the same plan.

    Args:
        remaining: samples of the epoch that are left, over all ranks.
        size: number of ranks.
        per_step: samples of one rank in a full step (microbatch size x microbatches).
        stop: end when the first rank has nothing left (`uneven_data: stop`), instead of when all have (`fill`).
    """

    def __init__(self, remaining: int, size: int, per_step: int, *, stop: bool) -> None:
        self._remaining, self._size, self._per_step = remaining, size, per_step
        longest, shortest = -(-remaining // size), remaining // size
        self.num_steps = -(-(shortest if stop else longest) // per_step)

    def samples(self, step: int) -> int:
        """Samples of step 0, 1, ... over all ranks."""
        full = self._per_step * self._size
        return max(0, min(full, self._remaining - step * full))
