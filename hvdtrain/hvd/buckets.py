"""Fused gradient buffers: how parameters are laid out in them, and one buffer's life within a step.

The layout is a pure function of what all ranks have agreed on, so that all of them reduce the same bytes in the same
order without another word.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.hvd.engine.groups import Group

# The first bucket is small, so that the network starts soon after backward does (as in DistributedDataParallel).
_FIRST_BUCKET_BYTES = 1024 * 1024
# Behind the gradients of the last bucket: how many ranks have joined, and a hash of the parameters in use, bit by bit.
HASH_BITS = 16
LANES = 1 + HASH_BITS


@dataclasses.dataclass(frozen=True)
class Description:
    """What must be equal on all ranks for one parameter.

    Attributes:
        stride: of the parameter where it is dense (channels-last and the like keep their order in the buffer).
        group: number of the explicit group (`groups=`), -1 without.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    group: int

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), list(self.stride), self.device, self.group]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> Description:
        name, dtype, shape, stride, device, group = value
        return cls(name, dtype, tuple(shape), tuple(stride), device, group)

    @property
    def numel(self) -> int:
        result = 1
        for dimension in self.shape:
            result *= dimension
        return result


def assign_buckets(descriptions: Sequence[Description], order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Split parameters into buckets of one device, dtype and explicit group.

    Args:
        descriptions: all parameters.
        order: their numbers in the order in which gradients become ready.
        bucket_bytes: upper limit of a bucket, unless one gradient alone is larger; 0 puts each into its own.

    Returns:
        Numbers per bucket, in the order in which the buckets are reduced.
    """
    buckets: list[list[int]] = []
    current: dict[tuple[str, str, int], int] = {}
    sizes: dict[int, int] = {}
    for number in order:
        description = descriptions[number]
        size = description.numel * getattr(torch, description.dtype).itemsize
        key = (description.device, description.dtype, description.group)
        where = current.get(key)
        limit = min(_FIRST_BUCKET_BYTES, bucket_bytes) if where == 0 else bucket_bytes
        if where is None or (description.group < 0 and sizes[where] + size > limit):
            where = current[key] = len(buckets)
            buckets.append([])
            sizes[where] = 0
        buckets[where].append(number)
        sizes[where] += size
    # A bucket is complete with its last gradient: reduce in that order.
    place = {number: i for i, number in enumerate(order)}
    return sorted(buckets, key=lambda numbers: max(place[number] for number in numbers))


class Bucket:
    """One fused buffer.

    Attributes:
        views: by parameter number, the parameter's part of the buffer in the parameter's own layout.
        missing: parameters whose gradients are not in the buffer yet, in this step.
        work: the running reduction; None before it starts.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        descriptions: Sequence[Description],
        wire_dtype: torch.dtype,
        device: torch.device,
        lanes: bool,
        prescale: float,
        postscale: float,
    ) -> None:
        self.numbers = list(numbers)
        total = sum(descriptions[number].numel for number in numbers)
        self.buffer = torch.zeros(total + (LANES if lanes else 0), dtype=wire_dtype, device=device)
        self.lanes = self.buffer[total:] if lanes else None
        self.prescale = prescale
        self.postscale = postscale
        self.views: dict[int, torch.Tensor] = {}
        offset = 0
        for number in numbers:
            description = descriptions[number]
            self.views[number] = self.buffer.as_strided(description.shape, description.stride, offset)
            offset += description.numel
        self.missing = len(self.numbers)
        self.work: dist.Work | Any = None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp.SUM  # type: ignore[assignment]

    def launch(self, group: Group) -> None:
        """Start the reduction of what is in the buffer."""
        if self.prescale != 1.0:
            self.buffer.mul_(self.prescale)
        self.work = group.allreduce([self.buffer], self._options)

    def finish(self) -> None:
        """Wait for the reduction (on CUDA: let the current stream wait)."""
        self.work.wait()
        self.work = None
        self.missing = len(self.numbers)
        if self.postscale != 1.0:
            self.buffer.mul_(self.postscale)

    def read_lanes(self) -> list[float]:
        """Sums over the ranks of the lanes, undone of the scaling of the gradients; waits for the device."""
        assert self.lanes is not None
        factor = self.prescale * self.postscale
        return [round(value / factor, 3) for value in self.lanes.tolist()]


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides where its elements fill its memory, those of a contiguous tensor otherwise."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= length
    return tuple(tensor.stride())
