"""The API of horovod.torch 0.28.1 over torch.distributed: `import hvdtrain.hvd as hvd`.

Horovod itself is not needed. `hvdtrain exec SCRIPT` runs a script that imports `horovod.torch` on this package,
unchanged.
"""

from __future__ import annotations

from hvdtrain.hvd import elastic, mpi_ops
from hvdtrain.hvd.common.exceptions import HostsUpdatedInterrupt
from hvdtrain.hvd.engine.meet import meet_through
from hvdtrain.hvd.functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from hvdtrain.hvd.mpi_ops import *  # noqa: F403
from hvdtrain.hvd.optimizer import DistributedOptimizer
from hvdtrain.hvd.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "HostsUpdatedInterrupt",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "meet_through",
    *mpi_ops.__all__,
]
