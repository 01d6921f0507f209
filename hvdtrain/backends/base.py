"""Backend: what every backend promises.

The public methods are here, in `Collectives` and in `Connection`, and hold the guards (state, arguments, agreement of
the ranks), so that misuse fails in the same way under every backend and on a laptop. Subclasses hold the mechanism in
the `_hooks` and are told nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from hvdtrain.backends import state
from hvdtrain.backends.collectives import Collectives
from hvdtrain.backends.options import ConnectOptions, WrapOptions
from hvdtrain.backends.replica import Replica
from hvdtrain.errors import CollectiveError, ContractError, UserError


class Backend(Collectives):
    """A connection over which models are trained. Use as a context manager, or `start()` and `close()`."""

    compressions: ClassVar[tuple[str, ...]]

    def __init__(self, options: ConnectOptions | None = None) -> None:
        super().__init__(options)
        self._replicas: list[Replica] = []
        # Replicas that were ever made: Horovod matches gradients by name, and two models may use the same names.
        self._num_wrapped = 0

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

    def _no_compression(self, compression: str) -> str:
        return f"compression: {compression} with backend: {self.name}: choose one of {', '.join(self.compressions)}"

    def _release(self) -> None:
        while self._replicas:
            self._replicas.pop().close()

    # ---- hooks ----

    def _start_timeline(self, path: Path) -> bool:
        return False

    def _stop_timeline(self) -> None:
        return

    @abc.abstractmethod
    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, options: WrapOptions) -> Replica: ...
