"""The life of the connection between this process and the others: meeting, place, leaving, failing."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from hvdtrain.backends.options import ConnectOptions
from hvdtrain.errors import ContractError, LaunchError, StopRequested
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

if TYPE_CHECKING:
    from typing_extensions import Self


class Connection(abc.ABC):
    """The connection of this process to the others. Use as a context manager, or `start()` and `close()`."""

    name: ClassVar[str]

    def __init__(self, options: ConnectOptions | None = None) -> None:
        self.options = options or ConnectOptions()
        self._state: Literal["new", "started", "closed"] = "new"
        self._rendezvous: Rendezvous | None = None
        self._guard: Guard | None = None
        self._device = torch.device("cpu")
        self._connected = False
        self._environ_before: dict[str, str] | None = None

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
                self._agree_to_leave()
        self._state = "closed"
        self._release()
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

    def __enter__(self) -> Self:
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

    # ---- guards ----

    def _met(self) -> Rendezvous:
        if self._rendezvous is None:
            raise ContractError("the backend is not started: call start() or use it in a with statement")
        return self._rendezvous

    def _require_started(self, call: str) -> None:
        if self._state != "started":
            raise ContractError(f"{call}() on a backend that is {self._state}: it works between start() and close()")

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

    @abc.abstractmethod
    def _connect(self) -> None: ...

    @abc.abstractmethod
    def _disconnect(self, failed: bool) -> None: ...

    @abc.abstractmethod
    def _library_place(self) -> tuple[int, int]: ...

    @abc.abstractmethod
    def _agree_to_leave(self) -> None:
        """Raise CollectiveError, on every rank, unless all ranks are closing. Collective."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Drop what was made over this connection. Not collective."""
