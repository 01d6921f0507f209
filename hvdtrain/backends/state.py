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
    from hvdtrain.backends.base import Backend

_PIECE_BYTES = 64 * 1024 * 1024


class _Slot:
    """Stands for a tensor in a pickled structure. Top level and tiny, so that it pickles everywhere."""

    def __init__(self, index: int) -> None:
        self.index = index


def broadcast_module(backend: Backend, module: nn.Module, root: int) -> None:
    """Overwrite parameters and buffers with the root's. Collective."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    broadcast_tensors(backend, tensors, root)


def broadcast_tensors(backend: Backend, tensors: Mapping[str, torch.Tensor], root: int) -> None:
    """Overwrite the tensors with the root's values, in place. Collective; names, shapes and dtypes must agree."""
    names = sorted(tensors)
    shapes = [(name, tuple(tensors[name].shape), str(tensors[name].dtype)) for name in names]
    expected = backend.broadcast_object(shapes, root)
    problem = None if shapes == expected else sorted(set(map(str, shapes)) ^ set(map(str, expected)))[:4]
    problems = backend.all_gather_object(problem)
    for rank, found in enumerate(problems):
        if found:
            raise CollectiveError(
                f"rank {rank} and rank {root} hold different tensors: {', '.join(found)}; build the same model "
                f"everywhere"
            )
    _overwrite(backend, [tensors[name] for name in names], root)


def broadcast_optimizer(backend: Backend, optimizer: torch.optim.Optimizer, root: int) -> None:
    """Give every rank the root's optimizer state and the options of its groups. Collective; takes no step.

    Works when only the root has state: the others make theirs from its description.
    """
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
        optimizer.load_state_dict(_put_back(skeleton, tensors))


def _overwrite(backend: Backend, tensors: list[torch.Tensor], root: int) -> None:
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
