"""Helpers of `horovod.common.util` that scripts and tests import."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from hvdtrain.hvd.basics import gloo_built as _gloo_built
from hvdtrain.hvd.basics import nccl_built as _nccl_built

_Item = TypeVar("_Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework's extension is there: torch's, which is hvdtrain.hvd itself."""
    return ext_base_name == "torch"


def gloo_built(verbose: bool = False) -> bool:
    """Whether gloo carries host tensors."""
    return _gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Whether NCCL carries CUDA tensors."""
    return bool(_nccl_built())


def mpi_built(verbose: bool = False) -> bool:
    """False: MPI carries nothing here."""
    return False


def gpu_available(ext_base_name: str = "torch", verbose: bool = False) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the duration of a with block; None leaves a variable alone."""
    values = {key: value for key, value in kwargs.items() if value is not None}
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = old


def is_iterable(x: Any) -> bool:
    """Whether `iter(x)` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True


def split_list(l: Sequence[_Item], n: int) -> list[Sequence[_Item]]:  # noqa: E741 (Horovod's argument name)
    """Split into n parts whose lengths differ by at most one."""
    share, rest = divmod(len(l), n)
    return [l[i * share + min(i, rest) : (i + 1) * share + min(i + 1, rest)] for i in range(n)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether Adasum can pair so many ranks."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember a function's results by its arguments."""
    return functools.cache(function)
