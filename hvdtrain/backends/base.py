"""Backend and Replica: what every backend promises.

The public methods are here and hold the guards (state, arguments, agreement of the ranks), so that misuse fails in the
same way under every backend and on a laptop. Subclasses hold the mechanism in the `_hooks` and are told nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import nn

from hvdtrain.backends import signature, state, wire
from hvdtrain.backends.group import Group
from hvdtrain.backends.options import ConnectOptions, WrapOptions
from hvdtrain.backends.replica import Replica
from hvdtrain.errors import CollectiveError, ContractError, LaunchError, StopRequested, UserError
from hvdtrain.failure import Failure, Guard
from hvdtrain.launch import (
    Rendezvous,
    World,
    choose_device,
    cores,
    current,
    detect,
    export_interface,
    exported,
    keep_freed_memory,
    open_rendezvous,
    set_threads,
)

Op = Literal["sum", "mean", "min", "max", "product"]
T = TypeVar("T")


class Pending(Generic[T]):
    """A collective that has been started; `wait()` returns its result."""

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._results: list[T] = []

    def wait(self) -> T:
        """Block until the result is there; again: the same result. Not collective: every rank has joined in already."""
        if self._finish is not None:
            self._results.append(self._finish())
            self._finish = None
        return self._results[0]


class Backend(abc.ABC):
    """The connection of this process to the others. Use as a context manager, or `start()` and `close()`."""

    name: ClassVar[str]
    compressions: ClassVar[tuple[str, ...]]

    def __init__(self, options: ConnectOptions | None = None) -> None:
        self.options = options or ConnectOptions()
        self._state: Literal["new", "started", "closed"] = "new"
        self._rendezvous: Rendezvous | None = None
        self._guard: Guard | None = None
        self._device = torch.device("cpu")
        self._connected = False
        self._environ_before: dict[str, str] | None = None
        self._replicas: list[Replica] = []
        # Replicas that were ever made: Horovod matches gradients by name, and two models may use the same names.
        self._num_wrapped = 0
        self._groups: dict[tuple[int, ...], Group] = {}

    # ---- life ----

    def start(self) -> None:
        """Connect to the other ranks. Collective.

        An error on one rank after the ranks have met ends the job, as an error inside the `with` block does.

        Raises:
            LaunchError: the launcher's variables are wrong, a peer is missing after `start_timeout_s`, the library
                sees another rank or size than the launcher, or there are too few devices.
            ContractError: called twice.
        """
        if self._state != "new":
            raise ContractError(f"start() on a backend that is already {self._state}; make a new one")
        self._environ_before = exported.now(os.environ)
        try:
            self._rendezvous = self._meet(detect(os.environ, self.options.flags))
            self._start(self._rendezvous)
        except BaseException as error:
            self._fail(error)
            raise
        self._state = "started"

    def _start(self, rendezvous: Rendezvous) -> None:
        world = rendezvous.world
        # First of all, so that an error of one rank from here on reaches the others.
        self._guard = Guard(
            world,
            rendezvous.prefix("guard"),
            rendezvous.address,
            rendezvous.hosts[world.rank],
            stall_warning_s=self.options.stall_warning_s,
            stall_abort_s=self.options.stall_abort_s,
            silent_limit_s=self.options.silent_limit_s,
            on_failure=self._report_failure,
            handle_signals=self.options.handle_signals,
        )
        self._guard.start()
        if not self.options.keep_threads:
            set_threads(world, local_cpus=rendezvous.local_cpus)
        export_interface(rendezvous.interface, override=self.options.network_interface != "auto")
        self._device = choose_device(self.options.device, rendezvous, transport=self.options.transport)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            keep_freed_memory()
        with self._guard.operation(f"connecting {self.name}"):
            self._connect()
        self._connected = True
        self._check_place()
        current.remember(world, os.environ)

    def close(self, failed: bool = False) -> None:
        """Leave. Collective unless `failed`: then nothing is waited for. May be called twice.

        Raises:
            CollectiveError: another rank is in another collective; this backend stays open.
        """
        if self._state == "started" and not failed:
            with self.guard.operation("leaving"):
                self._agree(signature.encode("close"), self.world_group)
        self._state = "closed"
        while self._replicas:
            self._replicas.pop().close()
        if self._connected:
            self._connected = False
            # Where nobody else is waited for, a failure is no reason to leave things behind in this process.
            self._disconnect(failed and self.world.size > 1)
        if self._environ_before is not None:
            cores.roam_again(os.environ)
            exported.give_back(self._environ_before, os.environ)
            self._environ_before = None
        # Last: until here a broken connection is explained by whoever broke it.
        if self._guard is not None:
            self._guard.finish()
        if self._rendezvous is not None:
            self._rendezvous.close(failed=failed)

    def __enter__(self) -> Backend:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, StopRequested):
            self._fail(error)
            return
        try:
            self.close()
        except BaseException as broken:
            self._fail(broken)
            raise

    def _fail(self, error: BaseException) -> None:
        """Tell the other ranks and end with them: does not return. Alone: close; the caller lets the error go on."""
        try:
            if self._guard is not None and self._state != "closed":
                self._guard.fail(error)
        finally:
            self.close(failed=True)

    # ---- place ----

    @property
    def world(self) -> World:
        """This process's place among all."""
        return self._met().world

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self._met().hosts[self.world.rank]

    @property
    def interface(self) -> str:
        """The network interface of this host that reaches the other ranks; loopback where all are on one host."""
        return self._met().interface

    @property
    def launcher(self) -> str:
        """What started this process: torchrun, horovodrun, mpirun, srun, manual, none, ..."""
        return self._met().launcher

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        self._met()
        return self._device

    @property
    @abc.abstractmethod
    def transport(self) -> str:
        """What carries the bytes: nccl, gloo or mpi."""

    @property
    @abc.abstractmethod
    def world_group(self) -> Group:
        """All ranks."""

    @property
    def guard(self) -> Guard:
        """Liveness, stall watch and stop requests of this process."""
        if self._guard is None:
            raise ContractError("the backend is not started")
        return self._guard

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Call `callback` with the job's first failure before this process ends because of it."""
        self._failure_callback = callback

    _failure_callback: Callable[[Failure], None] | None = None

    def _report_failure(self, failure: Failure) -> None:
        if self._failure_callback is not None:
            self._failure_callback(failure)

    # ---- collectives ----

    def group(self, ranks: Sequence[int]) -> Group:
        """Make a group of some of the ranks. Collective over *all* ranks, with the same `ranks` everywhere.

        Raises:
            ContractError: a rank out of range or given twice, or an empty list; connected with `groups=False`.
            CollectiveError: the ranks passed different lists.
        """
        self._require_started("group")
        if not self.options.groups:
            raise ContractError("group(): this connection was opened with groups=False; connect with groups=True")
        # Compared before anything is refused: then all ranks refuse together.
        lists = self.all_gather_object([int(rank) for rank in ranks])
        if any(sorted(other) != sorted(lists[0]) for other in lists):
            said = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(lists))
            raise CollectiveError(f"group(): the ranks passed different lists: {said}")
        wanted = tuple(sorted(lists[0]))
        if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= self.world.size:
            raise ContractError(f"group(ranks={lists[0]}): give distinct ranks from 0 to {self.world.size - 1}")
        if len(wanted) == self.world.size:
            return self.world_group
        if wanted not in self._groups:
            with self.guard.operation(f"group {list(wanted)}"):
                self._groups[wanted] = self._group(wanted)
        return self._groups[wanted]

    def all_reduce(self, tensor: torch.Tensor, op: Op = "sum", group: Group | None = None) -> torch.Tensor:
        """Reduce over the ranks of `group` (all by default). Collective over the group.

        Args:
            tensor: any shape (0-d too) and real dtype, the same on every rank; never modified.
            op: sum | mean | min | max | product. Integers wrap around as torch's do. `mean` of integers and bools gives
                the default floating dtype. Bools count as 0 and 1: `sum` and `product` give int64; `min` (all) and
                `max` (any) give bools. 16-bit floats are reduced in float32 and rounded once.

        Returns:
            A new tensor of the same shape on the same device.

        Raises:
            CollectiveError: ranks disagree about call, shape, dtype or op.
            ContractError: an unknown op; a complex, quantized or sparse tensor.
        """
        group = self._member("all_reduce", group)
        if op not in wire.OPS:
            raise ContractError(f"all_reduce(op={op!r}): choose one of {', '.join(wire.OPS)}")
        _require_plain("all_reduce", tensor)
        with self.guard.operation(f"all_reduce {op}"):
            self._agree(signature.encode("all_reduce", tensor, op=op), group)
            carried = tensor.detach().to(wire.carried_dtype(tensor.dtype, op), copy=True).contiguous().reshape(-1)
            reduced = self._all_reduce(carried, "sum" if op == "mean" else op, group)
            result = reduced.reshape(tensor.shape)
        if op == "mean":
            result = result / group.size
        return result.to(wire.result_dtype(tensor.dtype, op))

    def start_sum(self, tensor: torch.Tensor, name: str) -> Pending[torch.Tensor]:
        """Start a sum over all ranks that runs beside backward(). Collective; no agreement is checked beforehand.

        For the trainer's few bytes of control a step: a 1-d float64 tensor on the CPU, same length everywhere.
        At most one per `name` may be under way.
        """
        self._require_started("start_sum")
        return Pending(self._start_sum(tensor.detach().clone(), name))

    def all_gather(self, tensor: torch.Tensor, group: Group | None = None) -> torch.Tensor:
        """Concatenate the ranks' tensors along dim 0, in order of rank. Collective over the group.

        Dim 0 may differ between ranks and may be 0; 0-d tensors count as shape (1,). The input is not modified.

        Raises:
            CollectiveError: the ranks disagree about the call, the dtype or the sizes after dim 0.
            ContractError: a complex, quantized or sparse tensor.
        """
        group = self._member("all_gather", group)
        _require_plain("all_gather", tensor)
        own = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        with self.guard.operation("all_gather"):
            rows = self._agree(signature.encode("all_gather", own), group)
            sizes = signature.first_sizes(rows)
            row_shape = own.shape[1:]
            row_bytes = own.element_size() * row_shape.numel()
            gathered = self._all_gather_bytes(wire.to_bytes(own), [size * row_bytes for size in sizes], group)
        return gathered.view(tensor.dtype).reshape(sum(sizes), *row_shape)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, group: Group | None = None) -> torch.Tensor:
        """The root's tensor, as a new tensor on every rank. Collective over the group; shape and dtype must agree.

        Args:
            root: the global rank whose values all receive.

        Raises:
            CollectiveError: the ranks disagree about the call, the root, the shape or the dtype.
            ContractError: a root outside the group; a complex, quantized or sparse tensor.
        """
        group = self._member("broadcast", group)
        self._check_root("broadcast", root, group)
        _require_plain("broadcast", tensor)
        with self.guard.operation(f"broadcast from rank {root}"):
            self._agree(signature.encode("broadcast", tensor, root=root), group)
            received = self._broadcast_bytes(wire.to_bytes(tensor).clone(), root, group)
        return received.view(tensor.dtype).reshape(tensor.shape)

    def broadcast_object(self, value: T, root: int = 0, group: Group | None = None) -> T:
        """The root's picklable object on every rank. Collective over the group."""
        group = self._member("broadcast_object", group)
        self._check_root("broadcast_object", root, group)
        with self.guard.operation(f"broadcast_object from rank {root}"):
            is_root = self.world.rank == root
            payload = _pickled(value) if is_root else torch.empty(0, dtype=torch.uint8)
            call = signature.encode("broadcast_object", root=root)
            call[-1] = payload.numel()
            rows = self._agree(call, group, ignore_last=True)
            num_bytes = rows[group.ranks.index(root)][-1]
            if not is_root:
                payload = torch.empty(num_bytes, dtype=torch.uint8)
            received = self._broadcast_bytes(payload, root, group)
        result: T = value if is_root else pickle.loads(received.numpy().tobytes())
        return result

    def all_gather_object(self, value: T, group: Group | None = None) -> list[T]:
        """Every rank's picklable object, in order of rank. Collective over the group."""
        group = self._member("all_gather_object", group)
        with self.guard.operation("all_gather_object"):
            payload = _pickled(value)
            call = signature.encode("all_gather_object")
            call[-1] = payload.numel()
            sizes = [row[-1] for row in self._agree(call, group, ignore_last=True)]
            gathered = self._all_gather_bytes(payload, sizes, group).numpy().tobytes()
        values, start = [], 0
        for size in sizes:
            values.append(pickle.loads(gathered[start : start + size]))
            start += size
        return values

    def barrier(self, group: Group | None = None) -> None:
        """Wait until every rank of the group is here. Collective over the group."""
        group = self._member("barrier", group)
        with self.guard.operation("barrier"):
            self._agree(signature.encode("barrier"), group)

    # ---- training ----

    def wrap(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, compression: str = "none", **options: Any
    ) -> Replica:
        """Wrap a model and its optimizer into a replica that is kept equal to the other ranks'. Collective.

        The model is moved nowhere: put it on `backend.device` first. Call `replica.broadcast_state()` before training.

        Args:
            compression: none | fp16, and bf16 | powersgd where the backend has them.
            options: the fields of `WrapOptions` (find_unused_parameters, static_graph, bucket_mb, compile, ...).

        Raises:
            ContractError: the model has no parameter that requires a gradient, sits on another device or is part of
                another replica; the optimizer has parameters that the model has not.
            UserError: the backend has no such compression.
            CollectiveError: the ranks' models differ in names, shapes or dtypes.
        """
        self._require_started("wrap")
        wrap_options = dataclasses.replace(WrapOptions(compression=compression), **options)
        if compression not in self.compressions:
            raise UserError(self._no_compression(compression))
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._check_model(model, trained, optimizer)
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in trained]
        for rank, other in enumerate(self.all_gather_object(shapes)):
            if other != shapes:
                raise CollectiveError(
                    f"wrap(): the models of rank {rank} and rank {self.world.rank} differ in trained parameters: "
                    f"{', '.join(map(str, state.differences(shapes, other)))}; build the same model on every rank"
                )
        with self.guard.operation("wrap"):
            replica = self._wrap(model, optimizer, wrap_options)
        self._num_wrapped += 1
        self._replicas.append(replica)
        return replica

    def _check_model(
        self, model: nn.Module, trained: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
    ) -> None:
        if not trained:
            raise ContractError("wrap(): no parameter of the model requires a gradient; there is nothing to train")
        for name, parameter in trained:
            if parameter.device.type != self.device.type:
                raise ContractError(
                    f"wrap(): parameter {name!r} is on {parameter.device}, this rank's device is {self.device}; "
                    f"call model.to(backend.device) before making the optimizer"
                )
        replicas = [replica for replica in self._replicas if not replica.is_closed]
        taken = {id(p) for replica in replicas for p in replica.bare_model.parameters() if p.requires_grad}
        for name, parameter in trained:
            if id(parameter) in taken:
                raise ContractError(
                    f"wrap(): parameter {name!r} is part of another replica; its gradient would be reduced twice. Wrap "
                    f"a model once, or close() the first replica"
                )
        own = {id(p) for p in model.parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ContractError(
                f"wrap(): the optimizer has {len(foreign)} parameter(s) that the model has not (first: shape "
                f"{list(foreign[0].shape)}); their gradients would not be reduced. Make the optimizer from this "
                f"model's parameters, after model.to(...)"
            )

    # ---- profiling ----

    def start_timeline(self, path: Path) -> bool:
        """Have the library record its own timeline, a Chrome trace, into `path` on this host. Call it on every rank.

        Returns:
            Whether it records; False where the library has no timeline or `ConnectOptions.timeline` was not set. Some
            ranks may be left without a file.
        """
        self._require_started("start_timeline")
        self._records_timeline = self.options.timeline and self._start_timeline(path)
        return self._records_timeline

    def stop_timeline(self) -> None:
        """Finish the file; nothing happens where none is recorded."""
        if self._records_timeline:
            self._records_timeline = False
            self._stop_timeline()

    _records_timeline = False

    # ---- guards ----

    def _met(self) -> Rendezvous:
        if self._rendezvous is None:
            raise ContractError("the backend is not started: call start() or use it in a with statement")
        return self._rendezvous

    def _require_started(self, call: str) -> None:
        if self._state != "started":
            raise ContractError(f"{call}() on a backend that is {self._state}: it works between start() and close()")

    def _member(self, call: str, group: Group | None) -> Group:
        self._require_started(call)
        if group is None:
            return self.world_group
        if self.world.rank not in group.ranks:
            raise ContractError(f"{call}() on rank {self.world.rank}, which is not in the group {list(group.ranks)}")
        return group

    def _check_root(self, call: str, root: int, group: Group) -> None:
        if root not in group.ranks:
            raise ContractError(f"{call}(root={root}): the group has the ranks {list(group.ranks)}")

    def _agree(self, call: torch.Tensor, group: Group, ignore_last: bool = False) -> list[list[int]]:
        """Exchange the description of the call; every rank of the group raises the same error if they differ."""
        if group.size == 1:
            return [call.tolist()]
        rows: list[list[int]] = self._all_gather_int64(call, group).reshape(group.size, signature.LENGTH).tolist()
        compared = [row[:-1] for row in rows] if ignore_last else rows
        problem = signature.disagreement(compared, group.ranks)
        if problem is not None:
            raise CollectiveError(problem)
        return rows

    def _no_compression(self, compression: str) -> str:
        return f"compression: {compression} with backend: {self.name}: choose one of {', '.join(self.compressions)}"

    def _check_place(self) -> None:
        rank, size = self._library_place()
        if (rank, size) == (self.world.rank, self.world.size):
            return
        ours = self.world
        alone = f": {ours.size} processes would each train alone" if size == 1 else ""
        raise LaunchError(
            f"{self.name} sees rank {rank} of {size}, the launcher ({self.launcher}) says rank {ours.rank} of "
            f"{ours.size}{alone}. Start the job with a launcher that {self.name} knows: torchrun, horovodrun, or the "
            f"mpirun of the MPI that it was built with (`hvdtrain doctor` tells which)"
        )

    # ---- hooks ----

    def _meet(self, detected: Any) -> Rendezvous:
        return open_rendezvous(
            detected,
            interface=self.options.network_interface,
            timeout_s=self.options.start_timeout_s,
        )

    def _start_timeline(self, path: Path) -> bool:
        return False

    def _stop_timeline(self) -> None:
        return

    @abc.abstractmethod
    def _connect(self) -> None: ...

    @abc.abstractmethod
    def _disconnect(self, failed: bool) -> None: ...

    @abc.abstractmethod
    def _library_place(self) -> tuple[int, int]: ...

    @abc.abstractmethod
    def _group(self, ranks: tuple[int, ...]) -> Group: ...

    @abc.abstractmethod
    def _all_gather_int64(self, vector: torch.Tensor, group: Group) -> torch.Tensor: ...

    @abc.abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: str, group: Group) -> torch.Tensor:
        """Reduce a 1-d tensor of a carried dtype that the hook may modify."""

    @abc.abstractmethod
    def _start_sum(self, tensor: torch.Tensor, name: str) -> Callable[[], torch.Tensor]: ...

    @abc.abstractmethod
    def _all_gather_bytes(self, own: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
        """Concatenate 1-d uint8 tensors of the given sizes, on the device of `own`."""

    @abc.abstractmethod
    def _broadcast_bytes(self, tensor: torch.Tensor, root: int, group: Group) -> torch.Tensor:
        """Broadcast a 1-d uint8 tensor that the hook may modify; the size is the same everywhere."""

    @abc.abstractmethod
    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: WrapOptions) -> Replica: ...


def _require_plain(call: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in wire.DTYPES:
        layout = "" if tensor.layout == torch.strided else f", {tensor.layout}"
        raise ContractError(f"{call}(): a tensor of {tensor.dtype}{layout} cannot travel; pass a dense, real one")


def _pickled(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
