"""Replica: a model and its optimizer on this rank, kept equal to the other ranks'."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hvdtrain.backends import state
from hvdtrain.errors import ContractError

if TYPE_CHECKING:
    from hvdtrain.backends.collectives import Collectives
    from hvdtrain.backends.options import WrapOptions
    from hvdtrain.backends.reductions import ReductionWatch


class Replica(abc.ABC):
    """One step is: `begin_step` (may be left out), `microbatch` for each microbatch (or `without_data`),
    `finish_gradients`, `step`.

    Attributes:
        model: what the forward pass calls; the wrapped (and compiled) model.
        bare_model: the model as the user made it; for evaluation, saving and everything that is not a training forward.
        optimizer: the optimizer as the user made it.
    """

    def __init__(
        self,
        backend: Collectives,
        model: nn.Module,
        bare_model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: WrapOptions,
    ) -> None:
        self.model = model
        self.bare_model = bare_model
        self.optimizer = optimizer
        self.options = options
        self._backend = backend
        # The microbatch that is expected next; None: the gradients of the step are complete but not finished.
        self._next_microbatch: int | None = 0
        self._finished = False
        self._closed = False
        # Where every microbatch is reduced: how many this rank has in this step, once the ranks have agreed, and the
        # reductions that the others do after this rank's last one.
        self._agreed_count: int | None = None
        self._rounds_left = 0

    # ---- one step ----

    def begin_step(self, count: int) -> None:
        """Agree with the other ranks on a step of which this rank has `count` microbatches; 0: no data.

        `microbatch(0, count)` and `without_data()` do it where it was not done. A loop in which the ranks do something
        else together within a step must call it before that: a rank without data is there long before the others.
        Collective where every microbatch is reduced, else it does nothing.

        Raises:
            ContractError: a step is under way.
        """
        self._require_open("begin_step")
        if self._next_microbatch != 0 or self._agreed_count is not None:
            raise ContractError(self._misordered(f"begin_step({count})"))
        if self._reduces_every_microbatch:
            self._agree_on(count)

    def _agree_on(self, count: int) -> None:
        # A rank without data takes part in one reduction all the same.
        self._rounds_left = self._most_microbatches(max(count, 1)) - max(count, 1)
        self._agreed_count = count

    @contextlib.contextmanager
    def microbatch(self, index: int, count: int) -> Iterator[None]:
        """Enclose forward and backward of microbatch `index` of the `count` that this rank has in this step.

        Gradients are summed over the microbatches; only the last one communicates (all of them where
        `sync_every_microbatch` is set). Collective in the last one. Ranks may differ in `count`.

        Raises:
            ContractError: out of order, or the gradients of the step are already complete.
        """
        self._require_open("microbatch")
        if self._next_microbatch is None or index != self._next_microbatch or not 0 <= index < count:
            raise ContractError(self._misordered(f"microbatch({index}, {count})"))
        every = self._reduces_every_microbatch
        if every and index == 0:
            if self._agreed_count is None:
                self._agree_on(count)
            elif self._agreed_count != count:
                raise ContractError(self._disagreed(f"microbatch({index}, {count})"))
        is_last = index == count - 1
        with self._microbatch(is_last or every):
            yield
        if every and not is_last:
            self._finish_gradients()
        self._next_microbatch = None if is_last else index + 1

    @property
    def _reduces_every_microbatch(self) -> bool:
        """For the whole of this step, and the same on every rank."""
        return self.options.sync_every_microbatch

    def _most_microbatches(self, count: int) -> int:
        """The largest count of any rank. Collective; what it costs is small beside a reduction per microbatch."""
        return int(self._backend.all_reduce(torch.tensor(count), "max"))

    def without_data(self) -> None:
        """Take part in a step with zero gradients, in place of its microbatches. Collective with the others' last one.

        For a rank whose data has ended while others go on. Buffers and hooks of the model are not touched.
        """
        self._require_open("without_data")
        if self._next_microbatch != 0:
            raise ContractError(self._misordered("without_data()"))
        if self._reduces_every_microbatch:
            if self._agreed_count is None:
                self._agree_on(0)
            elif self._agreed_count != 0:
                raise ContractError(self._disagreed("without_data()"))
        self._without_data()
        self._next_microbatch = None

    def finish_gradients(self) -> None:
        """Complete the reduction. Collective.

        Afterwards every `p.grad` is the mean over all ranks of the ranks' sums, with the same bits on every rank.

        Raises:
            ContractError: called before the last microbatch; or a parameter took no part in the step under a backend
                that must be told of it (the message names the parameters).
        """
        self._require_open("finish_gradients")
        if self._next_microbatch is not None or self._finished:
            raise ContractError(self._misordered("finish_gradients()"))
        self._finish_gradients()
        for _ in range(self._rounds_left):
            self._without_data()
            self._finish_gradients()
        self._rounds_left = 0
        self._agreed_count = None
        self._finished = True

    def step(self, apply: Callable[[], Any] | None = None) -> None:
        """Apply the gradients once, without communication.

        Args:
            apply: what to do in place of `optimizer.step()`, for instance a scaler's step; doing nothing skips.

        Raises:
            ContractError: `finish_gradients()` was not called in this step.
        """
        self._require_open("step")
        if not self._finished:
            raise ContractError(self._misordered("step()"))
        (apply or self.optimizer.step)()
        self._finished = False
        self._next_microbatch = 0

    # ---- state ----

    def broadcast_state(self, root: int = 0) -> None:
        """Give every rank the root's parameters, buffers and optimizer state and options. Collective.

        Never runs an optimizer step, so nothing moves; works when only the root has optimizer state.

        Raises:
            CollectiveError: the ranks' models differ in names, shapes or dtypes, or their optimizers in class or
                number of parameters.
        """
        self._require_open("broadcast_state")
        with self._backend.guard.operation(f"broadcast_state from rank {root}"):
            state.broadcast_module(self._backend, self.bare_model, root)
            state.broadcast_optimizer(self._backend, self.optimizer, root)

    def sync_buffers(self, root: int = 0) -> None:
        """Give every rank the root's buffers (batch-norm statistics are local while training). Collective."""
        self._require_open("sync_buffers")
        with self._backend.guard.operation(f"sync_buffers from rank {root}"):
            state.broadcast_tensors(self._backend, dict(self.bare_model.named_buffers()), root)

    def state_dict(self) -> dict[str, Any]:
        """`{"model": ..., "optimizer": ...}` in the same format under every backend. Not collective."""
        return {"model": self.bare_model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` gave, under this or another backend. Not collective; `broadcast_state` follows."""
        self.bare_model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])

    def watch_reductions(self) -> ReductionWatch:
        """From now on note when gradients are reduced, for profiling; until then nothing is noted. Not collective."""
        self._require_open("watch_reductions")
        return self._watch_reductions()

    def close(self) -> None:
        """Drop what the backend keeps for this replica; model and optimizer live on. `Backend.close()` calls it."""
        if not self._closed:
            self._closed = True
            self.model = self.bare_model
            self._close()

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise ContractError(f"{call}() on a replica whose backend is closed; only its state and model are left")

    def _misordered(self, call: str) -> str:
        if self._finished:
            expected = "step()"
        elif self._next_microbatch is None:
            expected = "finish_gradients()"
        else:
            expected = f"microbatch {self._next_microbatch}"
        order = "microbatch(0, n) ... microbatch(n-1, n), finish_gradients(), step()"
        return f"{call}: expected {expected}; a step is {order}"

    def _disagreed(self, call: str) -> str:
        return (
            f"{call}: this rank has told the others that it has {self._agreed_count} microbatch(es) in this step, and "
            f"they count on it"
        )

    # ---- hooks ----

    @abc.abstractmethod
    def _microbatch(self, communicates: bool) -> contextlib.AbstractContextManager[None]: ...

    @abc.abstractmethod
    def _without_data(self) -> None: ...

    @abc.abstractmethod
    def _finish_gradients(self) -> None: ...

    @abc.abstractmethod
    def _watch_reductions(self) -> ReductionWatch: ...

    @abc.abstractmethod
    def _close(self) -> None: ...


def compiled(model: nn.Module) -> nn.Module:
    """The model through torch.compile; it shares parameters and buffers with the model itself."""
    return cast(nn.Module, torch.compile(model))
