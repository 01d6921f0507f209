"""Native DistributedDataParallel over torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import gc
import inspect
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdtrain.backends.base import Backend
from hvdtrain.backends.ddp_compression import register_compression
from hvdtrain.backends.ddp_reductions import DdpReductions
from hvdtrain.backends.entry import Entry
from hvdtrain.backends.group import Group
from hvdtrain.backends.nothing import sparse_parameters
from hvdtrain.backends.options import WrapOptions
from hvdtrain.backends.reductions import ReductionWatch
from hvdtrain.backends.replica import Replica, compiled
from hvdtrain.errors import ContractError, LaunchError

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# The library's own time-out comes after ours, so that our message (rank, operation, stack) is the one that is seen.
_LIBRARY_GRACE_S = 120.0
_WORKER_PAUSE_S = 0.05
# Buffers stay local while training, as under Horovod; sync_buffers() equalises them when it matters. torch 2.13 gave
# the option a new name.
_LOCAL_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers": False
}


class DdpBackend(Backend):
    """torch.distributed: nccl for CUDA tensors, gloo for CPU tensors (or MPI where torch was built with it)."""

    name: ClassVar[str] = "ddp"
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16", "powersgd")
    _world_group: Group | None = None
    _control: Any = None

    @property
    def transport(self) -> str:
        wanted = self.options.transport
        return ("nccl" if self.device.type == "cuda" else "gloo") if wanted == "auto" else wanted

    @property
    def world_group(self) -> Group:
        if self._world_group is None:
            raise ContractError("the backend is not started")
        return self._world_group

    def _connect(self) -> None:
        if dist.is_initialized():
            raise ContractError(
                "torch.distributed is already initialised in this process; leave that to hvdtrain.connect"
            )
        rendezvous = self._met()
        timeout = datetime.timedelta(seconds=self.options.stall_abort_s + _LIBRARY_GRACE_S)
        dist.init_process_group(
            backend=self._library_backend(),
            store=rendezvous.prefix("ddp"),
            rank=self.world.rank,
            world_size=self.world.size,
            timeout=timeout,
            device_id=self.device if self.transport == "nccl" else None,
        )
        self._world_group = Group(tuple(range(self.world.size)), dist.group.WORLD)
        # Control messages run while backward() reduces; two threads on one gloo group give wrong sums.
        self._control = dist.group.WORLD if self.transport == "mpi" else dist.new_group(backend="gloo", timeout=timeout)

    def _library_backend(self) -> str:
        if self.transport == "nccl":
            if self.device.type != "cuda":
                raise LaunchError("transport: nccl needs CUDA, and the device here is the CPU; set transport: gloo")
            if not dist.is_nccl_available():
                raise LaunchError("transport: nccl, but this torch was built without NCCL; set transport: gloo")
            return "cpu:gloo,cuda:nccl"
        if self.transport == "mpi" and not dist.is_mpi_available():
            raise LaunchError(
                "transport: mpi, but this torch was built without MPI (the wheels on PyPI are). "
                "Set transport: gloo, or use backend: horovod, which can reduce over MPI"
            )
        return self.transport

    def _disconnect(self, failed: bool) -> None:
        self._world_group = self._control = None
        if failed:
            return
        # gloo's worker thread frees the last work item and wants the GIL while the interpreter shuts down, which aborts
        # the process now and then. It does not with the DDP modules collected before the group is destroyed; the pause
        # lets the thread get done where the user still holds such a module.
        gc.collect()
        time.sleep(_WORKER_PAUSE_S)
        dist.destroy_process_group()

    def _library_place(self) -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    def _group(self, ranks: tuple[int, ...]) -> Group:
        native = dist.new_group(list(ranks))
        return Group(ranks, native if self.world.rank in ranks else None)

    def _all_gather_int64(self, vector: torch.Tensor, group: Group) -> torch.Tensor:
        gathered = list(torch.empty(group.size, vector.numel(), dtype=vector.dtype).unbind())
        dist.all_gather(gathered, vector, group=group.native)
        return torch.cat(gathered)

    def _all_reduce(self, tensor: torch.Tensor, op: str, group: Group) -> torch.Tensor:
        dist.all_reduce(tensor, op=_OPS[op], group=group.native)
        return tensor

    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        work = dist.all_reduce(tensor, group=self._control, async_op=True)

        def finish() -> torch.Tensor:
            work.wait()
            return tensor

        return finish

    def _all_gather_bytes(self, own: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
        # torch's all_gather wants equal sizes: pad to the largest, cut afterwards.
        largest = max(sizes)
        if largest == 0:
            return own
        padded = own if own.numel() == largest else torch.cat([own, own.new_zeros(largest - own.numel())])
        gathered = list(own.new_empty(len(sizes), largest).unbind())
        dist.all_gather(gathered, padded, group=group.native)
        return torch.cat([row[:size] for row, size in zip(gathered, sizes, strict=True)])

    def _broadcast_bytes(self, tensor: torch.Tensor, root: int, group: Group) -> torch.Tensor:
        if tensor.numel():
            dist.broadcast(tensor, src=root, group=group.native)
        return tensor

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: WrapOptions) -> Replica:
        return DdpReplica(self, model, optimizer, options)


class DdpReplica(Replica):
    """The model inside DistributedDataParallel; gradients are final at the end of the last backward()."""

    def __init__(
        self, backend: DdpBackend, model: nn.Module, optimizer: torch.optim.Optimizer, options: WrapOptions
    ) -> None:
        self._entry = Entry(compiled(model) if options.compile else model, sparse_parameters(model))
        on_cuda = backend.device.type == "cuda"
        self._ddp = DistributedDataParallel(
            self._entry,
            device_ids=[backend.device.index] if on_cuda else None,
            init_sync=False,
            bucket_cap_mb=options.bucket_mb,
            find_unused_parameters=options.find_unused_parameters,
            static_graph=options.static_graph,
            gradient_as_bucket_view=True,
            **_LOCAL_BUFFERS,
        )
        register_compression(self._ddp, options.compression)
        self._has_stepped = False
        super().__init__(backend, self._ddp, model, optimizer, options)

    @property
    def _reduces_every_microbatch(self) -> bool:
        # torch learns a static graph in the first backward pass, and fails where that one does not communicate.
        return super()._reduces_every_microbatch or (self.options.static_graph and not self._has_stepped)

    @contextlib.contextmanager
    def _microbatch(self, communicates: bool) -> Iterator[None]:
        if not communicates:
            with self._ddp.no_sync():
                yield
            return
        self._entry.expect_call()
        yield
        if not self._entry.was_called:
            # Nothing would be reduced, and nobody would say so.
            raise ContractError(
                f"rank {self._backend.world.rank}: the forward pass of the last microbatch did not go through "
                f"replica.model; call that one (replica.bare_model is for evaluation)"
            )

    def _without_data(self) -> None:
        # DDP reduces what a forward through it leads to; a backward on bare parameters would leave the others waiting.
        with self._entry.without_model():
            self._ddp().backward()

    def _finish_gradients(self) -> None:
        # With parameters unused, DDP returns from backward() with gradients unreduced and complains in the *next*
        # forward: a step taken in between would make the ranks drift. So ask now.
        try:
            self._ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            raise ContractError(self._unused_message(str(error))) from None

    def step(self, apply: Callable[[], Any] | None = None) -> None:
        super().step(apply)
        self._has_stepped = True

    def _unused_message(self, reason: str) -> str:
        names = [name for name, p in self.bare_model.named_parameters() if p.requires_grad]
        listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", reason)
        unused = [names[int(i)] for i in listed.group(1).split()] if listed else []
        if not unused:
            unused = [name for name, p in self.bare_model.named_parameters() if p.requires_grad and p.grad is None]
        return (
            f"rank {self._backend.world.rank}: these parameters took no part in the last loss of this step, so their "
            f"gradients (and those of their buckets) were not reduced: {', '.join(unused) or 'unknown'}. Set "
            f"find_unused_parameters: true (backend ddp), or use every parameter in every loss, or backend: horovod"
        )

    def _watch_reductions(self) -> ReductionWatch:
        return DdpReductions(self._ddp)

    def _close(self) -> None:
        # See DdpBackend._disconnect: the DDP module has to go before the process group.
        del self._ddp, self._entry
