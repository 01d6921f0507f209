"""Process groups of our own: made from a store, known to nobody else, so that scripts may use torch.distributed too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from hvdtrain.hvd.engine.doubling import DoublingGroup, SmallSums, serves
from hvdtrain.hvd.engine.solo import SoloGroup

# A backend of torch.distributed (of which some stubs are missing), or SoloGroup for one rank alone.
Group = Any

# What a collective waits for a peer that neither answers nor breaks the connection, where no abort limit is set.
NO_LIMIT_S = 24 * 3600.0


def make_group(store: Store, rank: int, size: int, *, device_type: str, address: str, timeout_s: float | None) -> Group:
    """Create a group over gloo (host tensors) or NCCL (CUDA tensors). Collective over its members.

    Args:
        store: with a prefix of its own for this group.
        rank, size: within the group.
        device_type: "cpu" or "cuda".
        address: this host's address towards the others, for gloo.
        timeout_s: how long a collective waits for a silent peer.
    """
    if size == 1:
        return SoloGroup()
    timeout = timedelta(seconds=timeout_s or NO_LIMIT_S)
    if device_type == "cpu":
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        options._threads = 2
        return dist.ProcessGroupGloo(store, rank, size, options)
    if device_type == "cuda" and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl_options)
    raise RuntimeError(f"no collectives for {device_type} tensors in this build of torch")


class GroupPool:
    """The groups of one generation: one for each process set and device type, made when first needed.

    Only the data thread calls this, in the agreed order, so that all members make the same group at the same time.
    """

    def __init__(self, store: Store, rank: int, address: str, timeout_s: float | None, has_core: bool) -> None:
        self._store = store
        self._rank = rank
        self._address = address
        self._timeout_s = timeout_s
        self._sums = SmallSums(timeout_s or NO_LIMIT_S, spin=has_core)
        self._groups: dict[tuple[str, str], Group] = {}

    def get(self, label: str, members: tuple[int, ...], device_type: str) -> Group:
        """The group of these members; `label` is unique among process sets and plans."""
        key = (label, device_type)
        group = self._groups.get(key)
        if group is None:
            store = PrefixStore(f"{label}/{device_type}", self._store)
            rank = members.index(self._rank)
            group = self._groups[key] = make_group(
                store, rank, len(members), device_type=device_type, address=self._address, timeout_s=self._timeout_s
            )
        return group

    def get_for_sums(self, label: str, members: tuple[int, ...], device_type: str) -> Group:
        """Likewise, a group for sums alone, on the host's memory one that is quick with small ones."""
        group = self.get(label, members, device_type)
        if device_type != "cpu" or not serves(len(members)):
            return group
        key = (label, "small sums")
        if key not in self._groups:
            store = PrefixStore(f"{label}/doubling", self._store)
            rank = members.index(self._rank)
            self._groups[key] = DoublingGroup(group, self._sums, store, rank, len(members), self._address)
        return self._groups[key]

    def drop(self, label: str) -> None:
        """Forget the groups of this label."""
        for key in [key for key in self._groups if key[0] == label]:
            group = self._groups.pop(key)
            if isinstance(group, DoublingGroup):
                self._sums.remove(group)

    def clear(self) -> None:
        """Forget all, at the end."""
        for label in {label for label, _ in self._groups}:
            self.drop(label)
        self._sums.close()


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as bytes: gloo moves every dtype this way, also those it cannot name."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device=tensor.device)
