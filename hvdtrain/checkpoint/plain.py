"""Reduces a state to plain tensors and plain Python types, which `torch.load(weights_only=True)` accepts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hvdtrain.errors import CheckpointError

# A pickled int above 255 bytes uses an opcode that torch's restricted unpickler refuses.
_MAX_INT_BITS = 255 * 8 - 1


def plain(value: Any, where: str = "state") -> Any:
    """A copy of the containers in `value`, with plain values: tensors on the CPU, numbers, str, bytes, None.

    Numpy scalars and arrays, paths, enumerations over str and int, and subclasses of dict and list become their plain
    counterparts. A tensor that is a view into a larger storage is copied, so that the file does not carry the
    storage; tensors that share memory with equal shape (tied weights) stay tied.

    Raises:
        CheckpointError: something has no plain form; `where` and the keys to it are in the message.
    """
    try:
        return _Reducer().reduce(value, where)
    except RecursionError:
        raise CheckpointError(f"{where} is nested too deeply, or contains itself: it cannot be saved") from None


class _Reducer:
    def __init__(self) -> None:
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        # Storages of the originals stay alive while we work: a freed address could be used again and look tied.
        self._alive: list[torch.Tensor] = []

    def reduce(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, float, str, bytes, complex):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, np.ndarray):
            return self._array(value, where)
        if isinstance(value, np.generic):
            return self.reduce(_item(value, where), where)
        if isinstance(value, Mapping):
            return {self._key(key, where): self.reduce(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, tuple):  # named tuples and torch.Size too
            return tuple(self.reduce(item, f"{where}[{i}]") for i, item in enumerate(value))
        if isinstance(value, list):
            return [self.reduce(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, (set, frozenset)):
            return {self._key(item, where) for item in value}
        return _scalar(value, where)

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, tuple):
            return tuple(self._key(item, where) for item in key)
        return _scalar(key.item() if isinstance(key, np.generic) else key, f"a key of {where}")

    def _array(self, array: np.ndarray[Any, Any], where: str) -> torch.Tensor:
        try:
            return torch.from_numpy(np.ascontiguousarray(array).copy()).reshape(array.shape)
        except TypeError as error:
            raise CheckpointError(f"{where} is a numpy array of {array.dtype}, which torch cannot hold") from error

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.is_meta:
            kind = "a tensor without data (meta device)" if tensor.is_meta else f"a {type(tensor).__name__}"
            raise CheckpointError(f"{where} is {kind}: only plain tensors can be saved")
        if tensor.layout is not torch.strided:
            return tensor.cpu()
        tensor = tensor.resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        identity = (
            storage.data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device,
        )
        if tensor.numel() and identity in self._tensors:
            return self._tensors[identity]
        on_cpu = tensor.cpu()
        if on_cpu.untyped_storage().nbytes() != on_cpu.numel() * on_cpu.element_size():
            on_cpu = on_cpu.clone()
        self._alive.append(tensor)
        self._tensors[identity] = on_cpu
        return on_cpu


def _item(value: np.generic, where: str) -> Any:
    item = value.item()
    if isinstance(item, np.generic):  # longdouble and friends have no Python counterpart
        raise CheckpointError(f"{where} is a numpy {value.dtype}, which Python has no plain type for")
    return item


def _scalar(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, float, str, bytes, complex):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        if number.bit_length() > _MAX_INT_BITS:
            raise CheckpointError(f"{where} is an int of {number.bit_length()} bits: too big to be saved")
        return number
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind = type(value)
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds only tensors, numbers, str, bytes, "
        f"None, dict, list, tuple and set. Turn it into one of these, or leave it out of the state"
    )
