"""Collectives of tensors and objects, the same under every backend: checked and agreed upon before they run."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import torch

from hvdtrain.backends import signature, wire
from hvdtrain.backends.connection import Connection
from hvdtrain.backends.group import Group
from hvdtrain.backends.options import ConnectOptions
from hvdtrain.backends.pending import Pending
from hvdtrain.errors import CollectiveError, ContractError

Op = Literal["sum", "mean", "min", "max", "product"]
T = TypeVar("T")


class Collectives(Connection):
    """What the ranks of a connection do together. The hooks get arguments that are valid and agree."""

    def __init__(self, options: ConnectOptions | None = None) -> None:
        super().__init__(options)
        self._groups: dict[tuple[int, ...], Group] = {}

    @property
    @abc.abstractmethod
    def world_group(self) -> Group:
        """All ranks."""

    def group(self, ranks: Sequence[int]) -> Group:
        """Make a group of some of the ranks. Collective over *all* ranks, with the same `ranks` everywhere.

        Raises:
            ContractError: a rank out of range or given twice, or an empty list; connected with `groups=False`.
            CollectiveError: the ranks passed different lists.
        """
        self._require_started("group")
        if not self.options.groups:
            raise ContractError("group(): this connection was opened with groups=False; connect with groups=True")
        # Compared before anything is refused: then all ranks refuse together.
        lists = self.all_gather_object([int(rank) for rank in ranks])
        if any(sorted(other) != sorted(lists[0]) for other in lists):
            said = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(lists))
            raise CollectiveError(f"group(): the ranks passed different lists: {said}")
        wanted = tuple(sorted(lists[0]))
        if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= self.world.size:
            raise ContractError(f"group(ranks={lists[0]}): give distinct ranks from 0 to {self.world.size - 1}")
        if len(wanted) == self.world.size:
            return self.world_group
        if wanted not in self._groups:
            with self.guard.operation(f"group {list(wanted)}"):
                self._groups[wanted] = self._group(wanted)
        return self._groups[wanted]

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", group: Group | None = None) -> torch.Tensor:
        """Reduce over the ranks of `group` (all by default). Collective over the group.

        Args:
            tensor: any shape (0-d too) and real dtype, the same on every rank; never modified.
            op: sum | mean | min | max | product. Integers wrap around as torch's do. `mean` of integers and bools gives
                the default floating dtype. Bools count as 0 and 1: `sum` and `product` give int64; `min` (all) and
                `max` (any) give bools. 16-bit floats are reduced in float32 and rounded once.

        Returns:
            A new tensor of the same shape on the same device.

        Raises:
            CollectiveError: ranks disagree about call, shape, dtype or op.
            ContractError: an unknown op; a complex, quantized or sparse tensor.
        """
        group = self._member("all_reduce", group)
        if op not in wire.OPS:
            raise ContractError(f"all_reduce(op={op!r}): choose one of {', '.join(wire.OPS)}")
        _require_plain("all_reduce", tensor)
        with self.guard.operation(f"all_reduce {op}"):
            self._agree(signature.encode("all_reduce", tensor, op=op), group)
            carried = tensor.detach().to(wire.carried_dtype(tensor.dtype, op), copy=True).contiguous().reshape(-1)
            reduced = self._all_reduce(carried, "sum" if op == "mean" else op, group)
            result = reduced.reshape(tensor.shape)
        if op == "mean":
            result = result / group.size
        return result.to(wire.result_dtype(tensor.dtype, op))

    def start_sum(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        """Start a sum over all ranks that runs beside backward(). Collective; no agreement is checked beforehand.

        For the trainer's few bytes of control a step: a 1-d float64 tensor on the CPU, same length everywhere.
        At most one per `name` may be under way.
        """
        self._require_started("start_sum")
        return Pending(self._start_sum(tensor.detach().clone(), name))

    def all_gather(self, tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
        """Concatenate the ranks' tensors along dim 0, in order of rank. Collective over the group.

        Dim 0 may differ between ranks and may be 0; 0-d tensors count as shape (1,). The input is not modified.

        Raises:
            CollectiveError: the ranks disagree about the call, the dtype or the sizes after dim 0.
            ContractError: a complex, quantized or sparse tensor.
        """
        group = self._member("all_gather", group)
        _require_plain("all_gather", tensor)
        own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        with self.guard.operation("all_gather"):
            rows = self._agree(signature.encode("all_gather", own), group)
            sizes = signature.first_sizes(rows)
            row_shape = own.shape[1:]
            row_bytes = own.element_size() * row_shape.numel()
            gathered = self._all_gather_bytes(wire.to_bytes(own), [size * row_bytes for size in sizes], group)
        return gathered.view(tensor.dtype).reshape(sum(sizes), *row_shape)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, group: Group | None = None) -> torch.Tensor:
        """The root's tensor, as a new tensor on every rank. Collective over the group; shape and dtype must agree.

        Args:
            root: the global rank whose values all receive.

        Raises:
            CollectiveError: the ranks disagree about the call, the root, the shape or the dtype.
            ContractError: a root outside the group; a complex, quantized or sparse tensor.
        """
        group = self._member("broadcast", group)
        self._check_root("broadcast", root, group)
        _require_plain("broadcast", tensor)
        with self.guard.operation(f"broadcast from rank {root}"):
            self._agree(signature.encode("broadcast", tensor, root=root), group)
            received = self._broadcast_bytes(wire.to_bytes(tensor).clone(), root, group)
        return received.view(tensor.dtype).reshape(tensor.shape)

    def broadcast_object(self, value: T, root: int = 0, group: Group | None = None) -> T:
        """The root's picklable object on every rank. Collective over the group."""
        group = self._member("broadcast_object", group)
        self._check_root("broadcast_object", root, group)
        with self.guard.operation(f"broadcast_object from rank {root}"):
            is_root = self.world.rank == root
            payload = _pickled(value) if is_root else torch.empty(0, dtype=torch.uint8)
            call = signature.encode("broadcast_object", root=root)
            call[-1] = payload.numel()
            rows = self._agree(call, group, ignore_last=True)
            num_bytes = rows[group.ranks.index(root)][-1]
            if not is_root:
                payload = torch.empty(num_bytes, dtype=torch.uint8)
            received = self._broadcast_bytes(payload, root, group)
        result: T = value if is_root else pickle.loads(received.numpy().tobytes())
        return result

    def all_gather_object(self, value: T, group: Group | None = None) -> list[T]:
        """Every rank's picklable object, in order of rank. Collective over the group."""
        group = self._member("all_gather_object", group)
        with self.guard.operation("all_gather_object"):
            payload = _pickled(value)
            call = signature.encode("all_gather_object")
            call[-1] = payload.numel()
            sizes = [row[-1] for row in self._agree(call, group, ignore_last=True)]
            gathered = self._all_gather_bytes(payload, sizes, group).numpy().tobytes()
        values, start = [], 0
        for size in sizes:
            values.append(pickle.loads(gathered[start : start + size]))
            start += size
        return values

    def barrier(self, group: Group | None = None) -> None:
        """Wait until every rank of the group is here. Collective over the group."""
        group = self._member("barrier", group)
        with self.guard.operation("barrier"):
            self._agree(signature.encode("barrier"), group)

    # ---- guards ----

    def _member(self, call: str, group: Group | None) -> Group:
        self._require_started(call)
        if group is None:
            return self.world_group
        if self.world.rank not in group.ranks:
            raise ContractError(f"{call}() on rank {self.world.rank}, which is not in the group {list(group.ranks)}")
        return group

    def _check_root(self, call: str, root: int, group: Group) -> None:
        if root not in group.ranks:
            raise ContractError(f"{call}(root={root}): the group has the ranks {list(group.ranks)}")

    def _agree(self, call: torch.Tensor, group: Group, ignore_last: bool = False) -> list[list[int]]:
        """Exchange the description of the call; every rank of the group raises the same error if they differ."""
        if group.size == 1:
            return [call.tolist()]
        rows: list[list[int]] = self._all_gather_int64(call, group).reshape(group.size, signature.LENGTH).tolist()
        compared = [row[:-1] for row in rows] if ignore_last else rows
        problem = signature.disagreement(compared, group.ranks)
        if problem is not None:
            raise CollectiveError(problem)
        return rows

    def _agree_to_leave(self) -> None:
        self._agree(signature.encode("close"), self.world_group)

    # ---- hooks ----

    @abc.abstractmethod
    def _group(self, ranks: tuple[int, ...]) -> Group: ...

    @abc.abstractmethod
    def _all_gather_int64(self, vector: torch.Tensor, group: Group) -> torch.Tensor: ...

    @abc.abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: str, group: Group) -> torch.Tensor:
        """Reduce a 1-d tensor of a carried dtype that the hook may modify."""

    @abc.abstractmethod
    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]: ...

    @abc.abstractmethod
    def _all_gather_bytes(self, own: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
        """Concatenate 1-d uint8 tensors of the given sizes, on the device of `own`."""

    @abc.abstractmethod
    def _broadcast_bytes(self, tensor: torch.Tensor, root: int, group: Group) -> torch.Tensor:
        """Broadcast a 1-d uint8 tensor that the hook may modify; the size is the same everywhere."""


def _require_plain(call: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in wire.DTYPES:
        layout = "" if tensor.layout == torch.strided else f", {tensor.layout}"
        raise ContractError(f"{call}(): a tensor of {tensor.dtype}{layout} cannot travel; pass a dense, real one")


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
