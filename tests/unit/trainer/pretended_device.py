"""Tensors that say they are on another device and compute on the CPU: what a GPU refuses, without a GPU.

They are on "meta". As on CUDA, they do not mix with tensors of the CPU, except with single numbers in arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_NO_MIXED_NUMBERS = ("stack", "cat", "where", "index", "embedding")


class Elsewhere(torch.Tensor):
    """A copy of a CPU tensor on the pretended device. `reads` counts the values that the host was given."""

    reads = 0
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Elsewhere:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=DEVICE,
            requires_grad=tensor.requires_grad,
        )  # fmt: skip
        made.inner = tensor.detach()
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        strangers = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls)
        ]
        if any(leaf.dim() > 0 for leaf in strangers) or (strangers and name.startswith(_NO_MIXED_NUMBERS)):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cpu and {DEVICE}")
        if strangers and args[0] is strangers[0] and name.rstrip("_") != name:
            raise RuntimeError(f"{name}: in place on cpu, with a number on {DEVICE}")
        to_cpu = name == "_to_copy" and kwargs.get("device") == torch.device("cpu")
        if name == "_local_scalar_dense" or to_cpu:
            cls.reads += 1
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return result if to_cpu else tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Elsewhere) else value
