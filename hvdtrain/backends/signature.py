"""A fixed-size description of a collective call, exchanged before it, so that ranks that disagree get an error.

torch.distributed matches collectives by call order alone: another size aborts a process, another dtype gives garbage,
another operation waits for the time-out. Every public collective of `Backend` therefore starts with the same exchange
of 16 integers; the ranks compare, and all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.backends.wire import DTYPES, OPS

CALLS = ("all_reduce", "all_gather", "broadcast", "broadcast_object", "all_gather_object", "barrier", "close")
_MAX_DIMS = 8
LENGTH = 16
# Positions: call, op, root, dtype, ndim, first sizes; dim 0 of an all_gather may differ.
_CALL, _OP, _ROOT, _DTYPE, _NDIM, _SHAPE = 0, 1, 2, 3, 4, 5


def encode(call: str, tensor: torch.Tensor | None = None, *, op: str = "sum", root: int = 0) -> torch.Tensor:
    """The call as int64 of shape (16,). Tensors of more than 8 dimensions are described by their last sizes folded."""
    values = [0] * LENGTH
    values[_CALL], values[_OP], values[_ROOT] = CALLS.index(call), OPS.index(op), root
    if tensor is not None:
        values[_DTYPE], values[_NDIM] = DTYPES.index(tensor.dtype) if tensor.dtype in DTYPES else -1, tensor.dim()
        sizes = list(tensor.shape)
        for size in sizes[_MAX_DIMS:]:
            sizes[_MAX_DIMS - 1] *= size
        values[_SHAPE : _SHAPE + min(len(sizes), _MAX_DIMS)] = sizes[:_MAX_DIMS]
    return torch.tensor(values, dtype=torch.int64)


def describe(row: Sequence[int]) -> str:
    """The call in words, for an error."""
    call = CALLS[row[_CALL]]
    if call in ("barrier", "close", "all_gather_object"):
        return f"{call}()"
    if call == "broadcast_object":
        return f"{call}(root={row[_ROOT]})"
    dtype = str(DTYPES[row[_DTYPE]]).removeprefix("torch.") if row[_DTYPE] >= 0 else "unsupported dtype"
    shape = list(row[_SHAPE : _SHAPE + min(row[_NDIM], _MAX_DIMS)])
    extra = {"all_reduce": f", op={OPS[row[_OP]]}", "broadcast": f", root={row[_ROOT]}"}.get(call, "")
    return f"{call}({dtype}{shape}{extra})"


def disagreement(rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> str | None:
    """What the ranks disagree about, in one sentence, or None. Dim 0 is free in an all_gather."""
    keys = []
    for row in rows:
        key = list(row)
        if CALLS[row[_CALL]] == "all_gather" and row[_NDIM] > 0:
            key[_SHAPE] = 0
        keys.append(tuple(key))
    if len(set(keys)) == 1:
        return None
    calls: dict[str, list[int]] = {}
    for row, rank in zip(rows, ranks, strict=True):
        calls.setdefault(describe(row), []).append(rank)
    said = "; ".join(f"rank {', '.join(map(str, who))}: {what}" for what, who in calls.items())
    return f"the ranks called different collectives: {said}"


def first_sizes(rows: Sequence[Sequence[int]]) -> list[int]:
    """Dim 0 of every rank's tensor in an all_gather."""
    return [row[_SHAPE] for row in rows]
