"""Giving every rank the root's tensors: one routine for every backend.

Tensors travel as bytes in a few large pieces, so that any dtype works and hundreds of small tensors cost one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hvdtrain.backends import wire
from hvdtrain.errors import CollectiveError

if TYPE_CHECKING:
    from hvdtrain.backends.collectives import Collectives

_PIECE_BYTES = 64 * 1024 * 1024


class _Slot:
    """Stands for a tensor in a pickled structure. Top level and tiny, so that it pickles everywhere."""

    def __init__(self, index: int) -> None:
        self.index = index


def broadcast_module(backend: Collectives, module: nn.Module, root: int) -> None:
    """Overwrite parameters and buffers with the root's. Collective."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    broadcast_tensors(backend, tensors, root)


def broadcast_tensors(backend: Collectives, tensors: Mapping[str, torch.Tensor], root: int) -> None:
    """Overwrite the tensors with the root's values, in place. Collective; names, shapes and dtypes must agree."""
    names = sorted(tensors)
    shapes = [(name, tuple(tensors[name].shape), str(tensors[name].dtype)) for name in names]
    expected = backend.broadcast_object(shapes, root)
    problem = None if shapes == expected else differences(shapes, expected)
    problems = backend.all_gather_object(problem)
    for rank, found in enumerate(problems):
        if found:
            raise CollectiveError(
                f"rank {rank} and rank {root} hold different tensors: {', '.join(map(str, found))}; build the same "
                f"model everywhere"
            )
    _overwrite(backend, [tensors[name] for name in names], root)


def broadcast_optimizer(backend: Collectives, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's optimizer state and the options of its groups. Collective; takes no step.

    Works when only the root has state: the others make theirs from its description.

    Raises:
        CollectiveError: the optimizers differ in class, or in the number of parameters of a group.
    """
    form = (type(optimizer).__name__, [len(group["params"]) for group in optimizer.param_groups])
    for rank, other in enumerate(backend.all_gather_object(form)):
        if other != form:
            raise CollectiveError(
                f"the optimizers differ: rank {rank} has {other[0]} with groups of {other[1]} parameters, rank "
                f"{backend.world.rank} has {form[0]} with groups of {form[1]}; make the same optimizer on every rank"
            )
    is_root = backend.world.rank == root
    tensors: list[torch.Tensor] = []
    skeleton = _take_out(optimizer.state_dict(), tensors) if is_root else None
    described = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in tensors]
    skeleton, described = backend.broadcast_object((skeleton, described), root)
    if not is_root:
        tensors = [
            torch.empty(shape, dtype=dtype, device=backend.device if kind == backend.device.type else kind)
            for shape, dtype, kind in described
        ]
    _overwrite(backend, tensors, root)
    if not is_root:
        loaded = _put_back(skeleton, tensors)
        optimizer.load_state_dict(loaded)
        # Once more, as it came: torch casts what it loads to the parameters' dtype, and turns text into iterators.
        for parameter, values in zip(_parameters(optimizer), _states(loaded), strict=True):
            if values:
                optimizer.state[parameter] = values


def differences(ours: list[Any], theirs: list[Any]) -> list[Any]:
    """The first few entries that only one of the two lists has, in order."""
    return ([item for item in ours if item not in theirs] + [item for item in theirs if item not in ours])[:4]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states(saved: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each parameter in the order of `_parameters`; empty for those without."""
    return [saved["state"].get(index, {}) for group in saved["param_groups"] for index in group["params"]]


def _overwrite(backend: Collectives, tensors: list[torch.Tensor], root: int) -> None:
    with torch.no_grad():
        for piece in _pieces(tensors):
            received = backend.broadcast(torch.cat([wire.to_bytes(tensor) for tensor in piece]), root)
            start = 0
            for tensor in piece:
                num_bytes = tensor.numel() * tensor.element_size()
                # A copy of its own: a slice of the buffer may start at an offset that the dtype cannot view.
                values = received[start : start + num_bytes].clone().view(tensor.dtype).reshape(tensor.shape)
                tensor.copy_(values)
                start += num_bytes


def _pieces(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors on one device, of about 64 MiB each; a larger tensor is a piece of its own."""
    piece: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.device)):  # stable: the same order on every rank
        size = tensor.numel() * tensor.element_size()
        if piece and (num_bytes + size > _PIECE_BYTES or tensor.device != piece[0].device):
            yield piece
            piece, num_bytes = [], 0
        piece.append(tensor)
        num_bytes += size
    if piece:
        yield piece


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of a nested structure with its tensors replaced by slots and appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_take_out(item, tensors) for item in value])
    return value


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_put_back(item, tensors) for item in value])
    return value
