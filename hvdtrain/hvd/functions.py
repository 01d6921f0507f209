"""State and Python objects from one rank to the others."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch

from hvdtrain.hvd.basics import rank, size
from hvdtrain.hvd.broadcast import broadcast_, broadcast_async_
from hvdtrain.hvd.common.process_sets import ProcessSet, global_process_set
from hvdtrain.hvd.gather import allgather
from hvdtrain.hvd.handles import synchronize


def _dump(obj: Any) -> bytes:
    # Horovod uses cloudpickle, which also takes functions and classes defined in the script; used where it is there.
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    from hvdtrain.hvd.engine.reduction import tensor_bytes

    return tensor_bytes(tensor)


def broadcast_parameters(params: dict[str, Any] | Iterable[Any], root_rank: int) -> None:
    """Overwrite parameters or buffers with the root's.

    Args:
        params: a state dict, `named_parameters()`, or a list of parameters.
        root_rank: whose values all ranks get.

    Raises:
        ValueError: params is something else.
    """
    if isinstance(params, dict):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = [broadcast_async_(p, root_rank, name) for name, p in named if isinstance(p, torch.Tensor)]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on all ranks.

    Args:
        obj: picklable on the root; ignored elsewhere.
        root_rank: whose object all ranks get.
        name: of the operation; the type's name by default, so name it where the ranks pass different types.
        process_set: the ranks that take part.
    """
    label = type(obj).__name__ if name is None else name
    length = torch.zeros(1, dtype=torch.int64)
    data = torch.empty(0, dtype=torch.uint8)
    if rank() == root_rank:
        data = _to_tensor(_dump(obj))
        length[0] = data.numel()
    broadcast_(length, root_rank, f"{label}.sz", process_set)
    if rank() != root_rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{label}.t", process_set)
    return obj if rank() == root_rank else pickle.loads(_to_bytes(data))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's object, in rank order.

    Args:
        obj: picklable.
        name: of the operation; the type's name by default, so name it where the ranks pass different types.
    """
    label = type(obj).__name__ if name is None else name
    data = _to_tensor(_dump(obj))
    lengths = allgather(torch.tensor([data.numel()]), name=f"{label}.sz").tolist()
    gathered = _to_bytes(allgather(data, name=f"{label}.t"))
    objects, offset = [], 0
    for index in range(size()):
        objects.append(pickle.loads(gathered[offset : offset + lengths[index]]))
        offset += lengths[index]
    return objects


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give every rank the root's optimizer state and options (learning rate and so on).

    No step is taken and no weight moves, also where some ranks have no state yet. Where the root has none either,
    gradients that are missing become zeros, as scripts may expect from Horovod.

    Args:
        optimizer: a torch optimizer or a wrapped one, over the same parameters on all ranks.
        root_rank: whose state all ranks get.
        model: not needed, accepted for compatibility.

    Raises:
        ValueError: LBFGS, as under Horovod.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: list[torch.Tensor] = []
    description: Any = None
    is_root = rank() == root_rank
    if is_root:
        state = {
            i: _take_tensors(dict(optimizer.state[p]), tensors)
            for i, p in enumerate(parameters)
            if p in optimizer.state
        }
        options = [
            _take_tensors({k: v for k, v in group.items() if k != "params"}, tensors)
            for group in optimizer.param_groups
        ]
        description = (state, options)
    state, options = broadcast_object(description, root_rank, name="broadcast_optimizer_state")
    if not is_root:
        if len(options) != len(optimizer.param_groups) or any(i >= len(parameters) for i in state):
            raise ValueError(
                f"broadcast_optimizer_state: rank {root_rank} has {len(options)} parameter groups, rank {rank()} has "
                f"{len(optimizer.param_groups)}: the ranks have built different optimizers"
            )
        state = {i: _put_tensors(value, parameters[i].device, tensors) for i, value in state.items()}
        first = parameters[0].device if parameters else torch.device("cpu")
        options = [_put_tensors(value, first, tensors) for value in options]
    handles = [
        broadcast_async_(tensor, root_rank, f"broadcast_optimizer_state.{index}")
        for index, tensor in enumerate(tensors)
    ]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        optimizer.state.clear()
        for i, value in state.items():
            optimizer.state[parameters[i]] = value
        for group, values in zip(optimizer.param_groups, options, strict=True):
            group.update(values)
    if not state:
        for p in parameters:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


class _Slot:
    """Stands for a tensor in an object that is pickled; the tensors themselves follow in the same order."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.on_host = tensor.device.type == "cpu"


def _take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _Slot(value)
    if isinstance(value, dict):
        return {key: _take_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_tensors(item, tensors) for item in value)
    return value


def _put_tensors(value: Any, device: torch.device, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        where = torch.device("cpu") if value.on_host else device
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=where))
        return tensors[-1]
    if isinstance(value, dict):
        return {key: _put_tensors(item, device, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_tensors(item, device, tensors) for item in value)
    return value
