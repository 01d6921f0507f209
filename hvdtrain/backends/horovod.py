"""Horovod: the only place that knows it.

`HorovodBackend` takes the hvd *module* as a value: `horovod.torch` by default, or any module with the same API
(`hvdtrain.hvd`), so that every line here also runs where Horovod is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

from hvdtrain.backends import horovod_launch
from hvdtrain.backends.base import Backend
from hvdtrain.backends.group import Group
from hvdtrain.backends.horovod_compression import compressor
from hvdtrain.backends.horovod_reductions import HorovodReductions
from hvdtrain.backends.horovod_wait import SharedCores
from hvdtrain.backends.nothing import sparse_parameters
from hvdtrain.backends.options import ConnectOptions, WrapOptions
from hvdtrain.backends.reductions import ReductionWatch
from hvdtrain.backends.replica import Replica, compiled
from hvdtrain.errors import ContractError, LaunchError, UserError
from hvdtrain.horovod_build import explain_import_failure
from hvdtrain.launch import Rendezvous, cores, open_rendezvous
from hvdtrain.launch.threads import container_quota

# Backward passes until Horovod's hooks reduce, outside of the microbatch that communicates.
_NOT_NOW = 2**31 - 1
# The value of HOROVOD_TIMELINE that lets a program start and stop it.
_TIMELINE_ON_DEMAND = "DYNAMIC"


def import_horovod() -> ModuleType:
    """The real `horovod.torch`.

    Raises:
        UserError: it is missing or does not load; the message tells why and names the cure.
    """
    try:
        module = importlib.import_module("horovod.torch")
        # Without its compiled extension the import only warns, and leaves a module without functions.
        _ = module.init
    except Exception as error:  # a wheel for another torch raises more than ImportError
        raise UserError(explain_import_failure(error)) from error
    return module


class HorovodBackend(Backend):
    """Horovod's collectives; gradients are reduced by its DistributedOptimizer."""

    name: ClassVar[str] = "horovod"
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16")

    def __init__(self, options: ConnectOptions | None = None, hvd: ModuleType | None = None) -> None:
        super().__init__(options)
        self._is_real = hvd is None
        self._hvd: Any = import_horovod() if hvd is None else hvd
        self._server: Any = None
        self._met_over_mpi = False
        self._shared_cores: SharedCores | None = None

    @property
    def transport(self) -> str:
        if self.device.type == "cuda" and self._hvd.nccl_built():
            return "nccl"
        return "mpi" if self._hvd.mpi_enabled() else "gloo"

    @property
    def world_group(self) -> Group:
        return Group(tuple(range(self.world.size)), self._hvd.global_process_set)

    # ---- connecting ----

    def _meet(self, detected: Any) -> Rendezvous:
        def exchange(payload: bytes | None) -> bytes:
            # Over MPI Horovod itself can tell the others where rank 0 listens.
            self._check_not_initialized()
            self._init()
            self._met_over_mpi = True
            told: bytes = self._hvd.broadcast_object(payload, root_rank=0, name="hvdtrain.rendezvous")
            return told

        over_mpi = self._is_real and horovod_launch.connects_over_mpi(
            detected.launcher, self._hvd, self.options.transport
        )
        return open_rendezvous(
            detected,
            interface=self.options.network_interface,
            timeout_s=self.options.start_timeout_s,
            backend_exchange=exchange if over_mpi else None,
        )

    def _connect(self) -> None:
        self._check_transport()
        if self._is_real:
            self._shared_cores = SharedCores(self._met().machine_cpus, self.world.local_size)
        if not self._met_over_mpi:
            self._connect_by_rendezvous()
        if self._shared_cores is not None:
            self._shared_cores.open()

    def _connect_by_rendezvous(self) -> None:
        self._check_not_initialized()
        if self._shared_cores is not None:
            self._shared_cores.prepare()
            self._stay_on_own_core()
        if self._is_real:
            self._server = horovod_launch.prepare(self._met(), self._hvd, self.options.transport)
        else:
            # hvdtrain.hvd meets through what we have met through, also where the environment tells it nothing.
            self._hvd.meet_through(self._met())
        self._init()

    def _stay_on_own_core(self) -> None:
        """Where there is a core for each rank and none to spare, a rank that waits keeps its core busy, because Horovod
        waits in a loop, and Horovod's other threads wander between such cores: some steps take 12 ms in place of 2.
        """
        met = self._met()
        core = cores.own_core(met.machine_cpus, met.machine_rank, torch.get_num_threads(), container_quota())
        if self.device.type == "cpu" and core >= 0:
            cores.stay_on(core, os.environ)

    def _check_not_initialized(self) -> None:
        if self._hvd.is_initialized():
            raise ContractError("Horovod is already initialised in this process; leave hvd.init() to hvdtrain.connect")

    def _init(self) -> None:
        self._prepare_environment()
        if self._is_real:
            horovod_launch.note_init()
        self._hvd.init()

    def _check_transport(self) -> None:
        wanted = self.options.transport
        if wanted == "nccl" and not (self.device.type == "cuda" and self._hvd.nccl_built()):
            raise LaunchError(
                f"transport: nccl needs CUDA and a Horovod built with NCCL; here the device is {self.device} and "
                f"nccl_built() is {bool(self._hvd.nccl_built())}. Set transport: auto"
            )
        if wanted == "mpi" and not self._hvd.mpi_built():
            raise LaunchError(
                "transport: mpi, but this Horovod was built without MPI. Install libopenmpi-dev and run "
                "`hvdtrain build-horovod --force`, or set transport: gloo"
            )
        if wanted == "mpi" and self._is_real and not self._connects_over_mpi(self.launcher):
            raise LaunchError(
                f"transport: mpi, but the launcher is {self.launcher}. Start the job with mpirun or "
                f"`horovodrun --mpi`, or set transport: gloo"
            )

    def _connects_over_mpi(self, launcher: str) -> bool:
        return horovod_launch.connects_over_mpi(launcher, self._hvd, self.options.transport)

    def _prepare_environment(self) -> None:
        # Horovod reads these in init(). Its stall limits come after ours, so that our message is the one that is seen.
        if self.options.groups:
            os.environ.setdefault("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        os.environ.setdefault("HOROVOD_STALL_CHECK_TIME_SECONDS", str(int(self.options.stall_abort_s) + 60))
        os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(int(self.options.stall_abort_s) + 120))
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(self.options.stall_abort_s) + 120))
        if self.options.timeline:
            os.environ.setdefault("HOROVOD_TIMELINE", _TIMELINE_ON_DEMAND)

    def _disconnect(self, failed: bool) -> None:
        if self._shared_cores is not None:
            self._shared_cores.close()
        if not failed:
            self._hvd.shutdown()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _library_place(self) -> tuple[int, int]:
        return self._hvd.rank(), self._hvd.size()

    # ---- timeline ----

    def _start_timeline(self, path: Path) -> bool:
        # One that the user asked for, by a path in the variable, is left alone.
        if os.environ.get("HOROVOD_TIMELINE") != _TIMELINE_ON_DEMAND:
            return False
        self._hvd.start_timeline(str(path), mark_cycles=False)
        return True

    def _stop_timeline(self) -> None:
        self._hvd.stop_timeline()

    # ---- collectives: each is blocking, so one name per kind serves for ever and stays in Horovod's cache ----

    def _group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, self._hvd.add_process_set(list(ranks)))

    def _all_gather_int64(self, vector: torch.Tensor, group: Group) -> torch.Tensor:
        gathered: torch.Tensor = self._hvd.allgather(vector, name="hvdtrain.call", process_set=group.native)
        return gathered

    def _all_reduce(self, tensor: torch.Tensor, op: str, group: Group) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        native_op = {"sum": self._hvd.Sum, "min": self._hvd.Min, "max": self._hvd.Max, "product": self._hvd.Product}[op]
        reduced: torch.Tensor = self._hvd.allreduce(
            tensor, name="hvdtrain.all_reduce", op=native_op, process_set=group.native
        )
        return reduced

    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        handle = self._hvd.allreduce_async(tensor, name=f"hvdtrain.{name}", op=self._hvd.Sum)

        def finish() -> torch.Tensor:
            result: torch.Tensor = self._hvd.synchronize(handle)
            return result

        return finish

    def _all_gather_bytes(self, own: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
        if sum(sizes) == 0:
            return own
        gathered: torch.Tensor = self._hvd.allgather(own, name="hvdtrain.all_gather", process_set=group.native)
        return gathered

    def _broadcast_bytes(self, tensor: torch.Tensor, root: int, group: Group) -> torch.Tensor:
        if tensor.numel() == 0:
            return tensor
        received: torch.Tensor = self._hvd.broadcast(
            tensor, root_rank=root, name="hvdtrain.broadcast", process_set=group.native
        )
        return received

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: WrapOptions) -> Replica:
        return HorovodReplica(self, self._hvd, model, optimizer, options, number=self._num_wrapped)

    def _no_compression(self, compression: str) -> str:
        if compression in ("bf16", "powersgd"):
            return (
                f"compression: {compression} with backend: horovod: Horovod 0.28.1 has no bfloat16 and no PowerSGD. "
                f"Use compression: fp16, or backend: ddp"
            )
        return super()._no_compression(compression)


class HorovodReplica(Replica):
    """Gradients go through a DistributedOptimizer that reduces and never steps: the reducer.

    Wrapping the user's own optimizer would drop its state and defaults and replace its class; so an SGD over the same
    parameters carries Horovod's hooks, and the user's optimizer steps untouched. Gradients are final after the
    reducer's `synchronize()`.
    """

    def __init__(
        self,
        backend: HorovodBackend,
        hvd: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: WrapOptions,
        *,
        number: int,
    ) -> None:
        super().__init__(backend, compiled(model) if options.compile else model, model, optimizer, options)
        # Several replicas in one process (GAN style) may have parameters of one name; Horovod matches by name.
        named = [(f"replica{number}.{name}", p) for name, p in model.named_parameters() if p.requires_grad]
        # Divide before the sum, as the ddp hook does: 40000 on two ranks would not fit float16 otherwise.
        divide_first = options.compression == "fp16"
        self._reducer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in named], lr=0.0),
            named_parameters=named,
            compression=compressor(options.compression, [p.dtype for _, p in named], hvd),
            backward_passes_per_step=_NOT_NOW,
            gradient_predivide_factor=float(backend.world.size) if divide_first else 1.0,
        )
        self._sparse = sparse_parameters(model)

    @contextlib.contextmanager
    def _microbatch(self, communicates: bool) -> Iterator[None]:
        # Horovod's hooks fire whenever a backward pass reaches a parameter. Counting down from 1 in this microbatch and
        # from "never" elsewhere lets gradients add up before it, and keeps the backward pass of another replica (a
        # generator's, through its discriminator) from reducing these.
        if communicates:
            self._reducer.set_backward_passes_per_step(1)
        yield

    def _without_data(self) -> None:
        """Nothing: synchronize() submits zeros for every parameter without a gradient."""

    def _finish_gradients(self) -> None:
        for parameter in self._sparse:
            if parameter.grad is None:
                # What synchronize() would submit is dense, and never meets the other ranks' sparse gradients.
                parameter.grad = _no_rows_of(parameter)
        self._reducer.synchronize()
        self._reducer.set_backward_passes_per_step(_NOT_NOW)

    def _watch_reductions(self) -> ReductionWatch:
        reducer = self._reducer
        parameters = [p for p in self.bare_model.parameters() if p.requires_grad]
        return HorovodReductions(reducer, parameters, lambda: reducer.backward_passes_per_step == 1)

    def _close(self) -> None:
        # The hooks live as long as the nodes of the graph that they are on; only this list keeps those alive.
        getattr(self._reducer, "_grad_accs", []).clear()
        del self._reducer


def _no_rows_of(parameter: nn.Parameter) -> torch.Tensor:
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape)
