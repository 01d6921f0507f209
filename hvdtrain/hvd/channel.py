"""A planned path between the ranks: buckets in a fixed order on a process group that nothing else uses.

Once planned, a step needs no negotiation: every rank reduces every bucket, in order, once per step. What must be known
now and then travels in a few elements behind the last bucket: how many ranks have joined (they keep taking part with
zeros until all have), and whether all ranks use the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.hvd.buckets import HASH_BITS, Bucket, Description, assign_buckets
from hvdtrain.hvd.common.exceptions import HorovodInternalError
from hvdtrain.hvd.engine.groups import Group
from hvdtrain.hvd.engine.request import AVERAGE


class Channel:
    """Buckets and their group, without the parameters: a rank that joins before its first step has one too.

    Args:
        descriptions: the parameters agreed on.
        order: their numbers in the order in which gradients become ready.
        sparse: numbers of parameters with sparse gradients, which are not in any bucket.
        op: Average or Sum.
        predivide: gradient_predivide_factor.
        half: gradients travel as float16.
        bucket_bytes: limit of a bucket.
        num_ranks: of the process set.
        groups: by device type, what reduces the buckets.
        device: of CUDA parameters on this rank.
    """

    def __init__(
        self,
        descriptions: Sequence[Description],
        order: Sequence[int],
        sparse: Sequence[int],
        *,
        op: int,
        predivide: float,
        half: bool,
        bucket_bytes: int,
        num_ranks: int,
        groups: dict[str, Group],
        device: torch.device,
    ) -> None:
        self.descriptions = list(descriptions)
        self.sparse = frozenset(sparse)
        self.num_ranks = num_ranks
        self.groups = groups
        self.step = 0
        self.prescale_copies: dict[int, float] = {}
        self.bucket_of: dict[int, Bucket] = {}
        self.buckets: list[Bucket] = []
        layout = assign_buckets(descriptions, [n for n in order if n not in self.sparse], bucket_bytes)
        for place, numbers in enumerate(layout):
            dtype = getattr(torch, descriptions[numbers[0]].dtype)
            wire = torch.float16 if half and dtype.is_floating_point else dtype
            copy, before, after = _factors(op, predivide, num_ranks, wire)
            where = device if descriptions[numbers[0]].device == "cuda" else torch.device("cpu")
            bucket = Bucket(numbers, descriptions, wire, where, place == len(layout) - 1, before, after)
            self.buckets.append(bucket)
            for number in numbers:
                self.bucket_of[number] = bucket
                self.prescale_copies[number] = copy
        self._next = 0

    def launch_ready(self) -> None:
        """Start the buckets that are complete, never one before those ahead of it.

        Raises:
            HorovodInternalError: the path was given up.
        """
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            if not self.groups:
                raise HorovodInternalError("this optimizer's connections were closed: it is gone on another rank")
            bucket = self.buckets[self._next]
            bucket.launch(self.groups[bucket.buffer.device.type])
            self._next += 1

    def give_up(self) -> None:
        """Let go of the groups: with the last one who holds them the connections close, and a rank that waits for this
        one learns that it waits in vain. An optimizer may hold on to the channel."""
        self.groups = {}
        for bucket in self.buckets:
            bucket.work = None

    @property
    def launched(self) -> bool:
        """Whether a bucket of this step is on its way."""
        return self._next > 0

    def finish_step(self) -> None:
        """All buckets of this step were waited for."""
        self._next = 0
        self.step += 1

    def write_lanes(self, joined: bool, usage_hash: int) -> None:
        """Set what this rank tells the others in this step."""
        if self.buckets:
            lanes = self.buckets[-1].lanes
            assert lanes is not None
            bits = [float(usage_hash >> bit & 1) for bit in range(HASH_BITS)]
            lanes.copy_(torch.tensor([0.0] * (1 + HASH_BITS) if joined else [0.0, *bits]))
            if joined:
                lanes[0] = 1.0

    def usage_agreed(self) -> bool:
        """Whether all ranks that have not joined wrote the same hash."""
        if not self.buckets:
            return True
        joined, *bits = self.buckets[-1].read_lanes()
        live = self.num_ranks - joined
        return all(abs(bit) < 0.5 or abs(bit - live) < 0.5 for bit in bits)

    def take_part_until_all_joined(self) -> None:
        """Contribute zeros to every step until every rank of the set has joined. Blocks."""
        while self.buckets:
            # A step that was begun, and given up for join, is completed with zeros first.
            begun = self.launched
            for bucket in self.buckets[self._next :]:
                bucket.buffer.zero_()
                bucket.missing = 0
            self.write_lanes(not begun, 0)
            self.launch_ready()
            for bucket in self.buckets:
                bucket.finish()
            self.finish_step()
            if not begun and self.buckets[-1].read_lanes()[0] > self.num_ranks - 0.5:
                return


def _factors(op: int, predivide: float, num_ranks: int, wire: torch.dtype) -> tuple[float, float, float]:
    """Factors on the way into the buffer, before and after the reduction.

    Wide types are divided on the way in, which costs nothing; float16 honours the split the user asked for, because
    there overflow and underflow depend on it.
    """
    if op != AVERAGE:
        return 1.0, 1.0, 1.0
    if wire == torch.float16:
        return 1.0, 1.0 / predivide, predivide / num_ranks
    return 1.0 / num_ranks, 1.0, 1.0
