"""One PyTorch trainer, two backends: native DistributedDataParallel and Horovod.

    with hvdtrain.connect("ddp") as backend:
        replica = backend.wrap(model, optimizer)

gives an own loop what the trainer uses; `hvdtrain.world()` tells rank and size.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hvdtrain.launch.world import World

if TYPE_CHECKING:
    from hvdtrain.backends import Backend

__version__ = "0.1.0"
__all__ = ["World", "__version__", "connect", "world"]


def connect(backend: str = "ddp", **options: Any) -> Backend:
    """The connection to the other ranks, to be used as a context manager. Collective on entry and on exit.

    Args:
        backend: ddp | horovod.
        options: the fields of `hvdtrain.backends.ConnectOptions` (device, transport, start_timeout_s, ...).

    Raises:
        UserError: no such backend, or Horovod cannot be imported.
        LaunchError: on entry: the launcher's variables are wrong, or a peer is missing.
    """
    from hvdtrain.backends import ConnectOptions, make_backend

    return make_backend(backend, ConnectOptions(**options))


def world() -> World:
    """This process's place: of the connection if there is one, otherwise what the launcher's variables tell.

    Where they do not tell all (Open MPI leaves the node open), what is missing counts as one host until connected.
    Data-loader workers get the answer of their rank.
    """
    from hvdtrain.launch import current

    return current.world(os.environ)
