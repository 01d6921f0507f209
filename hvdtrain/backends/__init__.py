"""The two backends behind one interface. Nothing outside this folder asks which one it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.backends.base import Backend
from hvdtrain.backends.group import Group
from hvdtrain.backends.options import ConnectOptions, WrapOptions
from hvdtrain.backends.replica import Replica
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

BACKENDS = ("ddp", "horovod")


def make_backend(name: str, options: ConnectOptions | None = None, hvd: ModuleType | None = None) -> Backend:
    """The backend of that name, not yet started.

    Args:
        name: ddp | horovod.
        hvd: for horovod, a module with the API of `horovod.torch` to use in its place.

    Raises:
        UserError: no such backend, or Horovod cannot be imported.
    """
    if name == "ddp":
        from hvdtrain.backends.ddp import DdpBackend

        return DdpBackend(options)
    if name == "horovod":
        from hvdtrain.backends.horovod import HorovodBackend

        return HorovodBackend(options, hvd)
    hint = f" {name} is a transport: use backend ddp with transport {name}." if name in ("nccl", "gloo", "mpi") else ""
    raise UserError(f"backend {name!r}: choose one of {', '.join(BACKENDS)}.{hint}")


__all__ = ["BACKENDS", "Backend", "ConnectOptions", "Group", "Replica", "WrapOptions", "make_backend"]
