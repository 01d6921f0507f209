"""Gradient compression for DDP: communication hooks.

torch's own fp16 and bf16 hooks are not used: the bf16 one refuses gloo and neither manages sparse gradients.
"""

# No `from __future__ import annotations`: torch looks at the annotations of a hook and wants the classes themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def register_compression(ddp: DistributedDataParallel, compression: str) -> None:
    """Make the gradients travel in the given form. none | fp16 | bf16 | powersgd."""
    if compression == "none":
        return
    if compression == "powersgd":
        # Rank 1 and the first steps uncompressed: Vogels et al. 2019, as torch recommends.
        state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, _power_sgd_hook)
        return
    ddp.register_comm_hook(_DTYPES[compression], _cast_hook)


def _power_sgd_hook(state: powerSGD_hook.PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, one bucket at a time on CPUs.

    A bucket is reduced by a chain of sums, each begun by the one before. Under gloo that happens in threads of its own:
    with several buckets under way the ranks begin sums in different orders, and numbers of different buckets are added,
    or the process aborts. On GPUs all sums are begun by the thread that calls this, in one order.
    """
    future = powerSGD_hook.powerSGD_hook(state, bucket)
    if not bucket.buffer().is_cuda:
        future.wait()
    return future


def _cast_hook(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Cast, divide by the number of ranks, sum. Dividing before the sum keeps 40000 on two ranks within float16.

    Sparse buckets and those that are no wider than the target travel as they are. (torch wants the argument's name.)
    """
    gradients = bucket.buffer()
    size = dist.get_world_size()
    if gradients.is_sparse:
        return _sum(gradients.div(size), None)
    narrow = gradients.dtype.is_floating_point and gradients.element_size() > dtype.itemsize
    carried = (gradients.to(dtype) if narrow else gradients).div_(size)
    return _sum(carried, gradients if narrow else None)


def _sum(carried: torch.Tensor, into: torch.Tensor | None) -> torch.futures.Future[torch.Tensor]:
    """Start the sum; its future gives the reduced tensor, written into `into` where that is given."""
    work: Any = dist.all_reduce(carried, async_op=True)
    future: torch.futures.Future[Any] = work.get_future()

    def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
        result = done.value()
        reduced: torch.Tensor = result[0] if isinstance(result, list) else result
        return reduced if into is None else into.copy_(reduced)

    return future.then(finish)
